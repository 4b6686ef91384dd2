"""Meshes, layouts of parameters, expert parallelism and the sharded update."""

from moejax.parallel.mesh import AXES, DATA_AXES, make_mesh

__all__ = ["AXES", "DATA_AXES", "make_mesh"]
