"""What `kvferry bench kernels` and `make bench-gpu` measure on a GPU, and how."""
