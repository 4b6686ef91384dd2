"""The training step and its state, and the loop around them."""

from moejax.train.evaluate import evaluate, make_eval_step
from moejax.train.restore import restore_state
from moejax.train.state import TrainState, abstract_state, init_state
from moejax.train.step import make_train_step, put_batch

__all__ = ["TrainState", "abstract_state", "evaluate", "init_state", "make_eval_step", "make_train_step", "put_batch", "restore_state"]
