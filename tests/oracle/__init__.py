"""The independent truth: the model, its losses and its update written once more, as plainly as possible, in float64.

Nothing here imports moejax beyond its config dataclasses, and nothing here is JAX. Read layout.py (which row lies on which
rank), capacity.py (which routes are dropped), model.py (the network), losses.py (one step), update.py (the optimizer).
"""

from tests.oracle.capacity import kept_routes
from tests.oracle.layout import Layout
from tests.oracle.losses import StepOracle, flatten, step_oracle
from tests.oracle.model import Routes
from tests.oracle.update import Optimizer, learning_rate

__all__ = ["Layout", "Optimizer", "Routes", "StepOracle", "flatten", "kept_routes", "learning_rate", "step_oracle"]
