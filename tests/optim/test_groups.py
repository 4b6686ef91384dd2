"""Which parameters get which learning rate and decay."""

import re

import pytest

from moejax.config import OptimConfig
from moejax.errors import ConfigError
from moejax.optim import Group, parameter_groups

EXPERTS = {"w_in": 0, "w_out": 0}
PARAMS = {
    "embed": {"w_embed": 0, "norm": {"scale": 0}},
    "dense_blocks": {"mlp": EXPERTS, "ffn_norm_in": {"scale": 0}},
    "moe_blocks": {
        "moe": {"router": {"w_router": 0}, "experts": EXPERTS, "shared": EXPERTS},
        "attention": {"q_norm": {"scale": 0}, "w_q": 0},
    },
    "head": {"norm": {"scale": 0}, "w_head": 0},
}


def names_with(groups, wanted, prefix=""):
    """Dotted names of the leaves in this group."""
    found = set()
    for name, value in groups.items():
        if isinstance(value, dict):
            found |= names_with(value, wanted, f"{prefix}{name}.")
        elif value == wanted:
            found.add(prefix + name)
    return found


def test_norms_and_embeddings_do_not_decay_unless_told():
    groups = parameter_groups(OptimConfig(weight_decay=0.3), PARAMS)
    assert names_with(groups, Group(1.0, 0.0)) == {
        "embed.w_embed",
        "embed.norm.scale",
        "dense_blocks.ffn_norm_in.scale",
        "moe_blocks.attention.q_norm.scale",
        "head.norm.scale",
    }
    assert len(names_with(groups, Group(1.0, 0.3))) == 9


def test_routed_experts_have_their_own_rate_and_decay_and_shared_experts_do_not():
    groups = parameter_groups(OptimConfig(weight_decay=0.3, expert_lr_scale=0.5, expert_weight_decay=0.7), PARAMS)
    assert names_with(groups, Group(0.5, 0.7)) == {"moe_blocks.moe.experts.w_in", "moe_blocks.moe.experts.w_out"}
    assert groups["moe_blocks"]["moe"]["shared"]["w_in"] == Group(1.0, 0.3)


def test_an_expert_decay_of_zero_is_not_mistaken_for_none():
    groups = parameter_groups(OptimConfig(weight_decay=0.3, expert_weight_decay=0.0), PARAMS)
    assert groups["moe_blocks"]["moe"]["experts"]["w_in"] == Group(1.0, 0.0)


def test_globs_replace_the_default_and_reach_experts():
    groups = parameter_groups(OptimConfig(weight_decay=0.3, expert_lr_scale=2.0, no_decay=("*.experts.w_out", "head.w_*")), PARAMS)
    assert names_with(groups, Group(2.0, 0.0)) == {"moe_blocks.moe.experts.w_out"}
    assert names_with(groups, Group(1.0, 0.0)) == {"head.w_head"}


def test_no_globs_let_everything_decay():
    assert len(names_with(parameter_groups(OptimConfig(weight_decay=0.3, no_decay=()), PARAMS), Group(1.0, 0.3))) == 14


def test_a_glob_that_matches_nothing_is_refused_with_the_names_there_are():
    problem = "optim.no_decay holds 'embd.*', which matches no parameter; mend the glob or remove it. "
    names = "Parameters: dense_blocks.ffn_norm_in.scale, dense_blocks.mlp.w_in, "
    with pytest.raises(ConfigError, match=re.escape(problem + names)):
        parameter_groups(OptimConfig(no_decay=("*norm*", "embd.*")), PARAMS)
