"""Training state of a rank outside its device: in host memory or on a disk, whatever engine it is of.

`states` has master weights and moments by chunks, `gradients` what they are updated with,
`update` the update itself, `weights` the weights that a model computes with.
"""
