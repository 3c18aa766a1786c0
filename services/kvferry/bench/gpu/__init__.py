"""GPU benchmarks: kernels compared with other libraries, decode steps, and the kernel tuner."""
