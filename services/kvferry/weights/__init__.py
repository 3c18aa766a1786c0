"""Model weights and configuration: families, files, checkpoints, quantized matrices, adapters and heads.

Uses numpy but not torch. From the top: `adapters` and `heads` read beside `checkpoints`; `quantized` and `families`
handle schemes and classes; `files` reads bytes. The forward pass is in `kvferry.engine.execute`.
"""
