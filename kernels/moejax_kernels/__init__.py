"""Kernels of sparse mixture-of-experts layers. One folder per operation; needs jax and numpy only."""
