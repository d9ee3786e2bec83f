"""Layout-independent state: written, committed, verified, read.

All ranks together: `collective.save` and `collective.find`. One process, without torch: `catalog.ls`,
`verify.verify`, `read.CheckpointReader`.
"""
