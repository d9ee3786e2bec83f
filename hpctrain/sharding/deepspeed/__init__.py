"""DeepSpeed's ZeRO stages 1 to 3 behind the engine interface.

`config` says what DeepSpeed is told, `groups` which ranks it talks to, `patches` what is mended in it, `state`
where its fragments lie in the logical tensors, `engine` puts them together, `ops` builds its compiled parts.
"""
