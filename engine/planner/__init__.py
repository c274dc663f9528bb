"""What fits on which card, how fast it runs and what it costs. Arithmetic only: no torch, no numpy.

`resolve` turns a name, a folder, a config.json, a GGUF file or a size such as 7B into a
`ModelShape`; `weights` and `kv` count its bytes, `hardware` and `prices` describe the cards,
`memory` says what fits, `roofline` how fast a step is, `job` how long and how dear the whole job,
and `recommend` chooses. Nothing here reads a weight or touches a device.
"""
