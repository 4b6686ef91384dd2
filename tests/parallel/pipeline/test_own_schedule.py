"""A schedule is one file: found by itself, checked, and run by the executor when a config names it."""

import dataclasses
from unittest import mock

import pytest

from moejax.config import MeshConfig
from moejax.errors import ConfigError
from moejax.parallel.pipeline import SCHEDULES, build, check_schedule
from moejax.parallel.pipeline.schedules.table import kinds_in
from tests.oracle.compare import check
from tests.oracle.examples import batch, model_config, parameters, train_config
from tests.parallel.pipeline import example

MODEL = model_config(num_layers=2, recompute="block")


def config_with(schedule: str):
    return dataclasses.replace(train_config(MODEL, microbatches=4), mesh=MeshConfig(pp=2, ep=2, schedule=schedule))


def test_the_file_is_all_that_it_takes():
    with mock.patch.dict(SCHEDULES, kinds_in(example)):
        assert build("alternating", 4, 8).in_flight() == [4, 3, 2, 1]
        check(config_with("alternating"), parameters(MODEL), batch(padding=True))


def test_without_the_file_the_name_is_refused_before_anything_is_built():
    with pytest.raises(ConfigError, match=r"mesh\.schedule=alternating is not one of gpipe, 1f1b"):
        check_schedule(config_with("alternating"))
