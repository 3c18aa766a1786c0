"""Latent attention (DeepSeek-AI, DeepSeek-V2, 2024, section 2.1) on GPUs: writing of vectors to pages (`place`), and
absorbed attention for all rows (`attend`, with its kernel in `tiles`). Imports only `kernels`."""
