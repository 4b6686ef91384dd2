import pytest

from moejax.config import load_config
from moejax.config.overrides import print_help
from moejax.config.settings import choices, possible_names, settings
from moejax.errors import ConfigError
from tests.config.change import change

BASE = load_config("tiny_cpu")


def changed(*words: str) -> dict[str, object]:
    """Settings that differ from tiny_cpu after these words."""
    before = {setting.name: setting.value for setting in settings(BASE)}
    after = settings(load_config("tiny_cpu", words))
    return {setting.name: setting.value for setting in after if setting.value != before[setting.name]}


def refusal(*words: str, config: str = "tiny_cpu") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "result"),
    [
        (["--steps", "20"], {"steps": 20}),
        (["--steps=20"], {"steps": 20}),
        (["--model.moe.num-experts", "64", "--mesh.ep", "8"], {"model.moe.num_experts": 64, "mesh.ep": 8}),
        (["--model.moe.num_experts", "64", "--mesh.ep", "8"], {"model.moe.num_experts": 64, "mesh.ep": 8}),
        (["--model.moe.capacity-factor", "1.25"], {"model.moe.capacity_factor": 1.25}),
        (["--model.moe.router.normalize", "None"], {"model.moe.router.normalize": None}),
        (["--optim.lr", "1e-4"], {"optim.lr": 1e-4}),
        (["--model.attention.window-pattern", "64", "-1"], {"model.attention.window_pattern": (64, -1)}),
        (["--optim.no-decay"], {"optim.no_decay": ()}),
        (["--profile"], {"profile": True}),
        (["--profile", "--steps", "20"], {"profile": True, "steps": 20}),
        (["--data.document-mask", "False"], {"data.document_mask": False}),
        (["--model.dtype", "bfloat16"], {"model.dtype": "bfloat16"}),
        (["--log.wandb-project", "my project"], {"log.wandb_project": "my project"}),
        (["--name=--odd"], {"name": "--odd"}),
    ],
)
def test_words_change_the_settings_they_name(words: list[str], result: dict[str, object]) -> None:
    assert changed(*words) == result


def test_file_names_are_a_list() -> None:
    words = ["--data.source", "files", "--data.paths", "a.npy", "b.npy", "--data.eos-id", "0"]
    assert changed(*words)["data.paths"] == ("a.npy", "b.npy")


def test_settings_are_validated_together_not_one_by_one() -> None:
    # Each alone breaks a rule: 16 ranks do not divide 8 experts, a batch of 8 does not split into 16.
    assert "mesh.ep=16" in refusal("--mesh.ep", "16")
    assert changed("--mesh.ep", "16", "--model.moe.num-experts", "16", "--batch-size", "16")["mesh.ep"] == 16
    assert "shared_expert_dim" in refusal("--model.moe.num-shared-experts", "0")
    assert changed("--model.moe.num-shared-experts", "0", "--model.moe.shared-expert-dim", "0")["model.moe.num_shared_experts"] == 0


def test_broken_rule_is_the_configs_own_sentence() -> None:
    assert refusal("--model.moe.top-k", "12") == "model.moe.top_k=12 exceeds model.moe.num_experts=8; lower top_k or add experts"
    # A rule of the whole config, not of one group.
    assert refusal("--batch-size", "9", "--microbatches", "2").startswith("batch_size=9 does not split evenly into microbatches=2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.moe.numexperts", "3"], "there is no setting model.moe.numexperts; did you mean --model.moe.num-experts?"),
        (["--num-experts", "3"], "there is no setting num_experts; did you mean --model.moe.num-experts?"),
        (["--top-K", "3"], "there is no setting top_K; did you mean --model.moe.top-k?"),
        (["--mesh.eq", "3"], "there is no setting mesh.eq; did you mean --mesh.ep?"),
        (["--warmup", "3"], "there is no setting warmup; --help lists all settings"),
        (["--", "3"], "there is no setting ; --help lists all settings"),
        (["steps", "3"], "steps is not a setting; settings look like --steps 100, with the name first"),
        (["--steps", "abc"], "steps=abc is not a whole number; give it as in --steps 10"),
        (["--steps", "1e3"], "steps=1e3 is not a whole number; give it as in --steps 10"),
        (["--optim.lr", "fast"], "optim.lr=fast is not a number; give it as in --optim.lr 0.003"),
        (["--optim.lr", "inf"], "optim.lr=inf is not a number; give it as in --optim.lr 0.003"),
        (["--steps"], "steps needs a value; give a whole number, as in --steps 10"),
        (["--name", "a", "b"], "name takes one value, not 2 (a b); give a text, as in --name tiny_cpu"),
        (["--profile", "yes"], "profile=yes is not True or False; give it as in --profile False"),
        (["--data.document-mask", "true"], "data.document_mask=true is not True or False; did you mean True?"),
        (["--model.moe.capacity-factor", "none"], "model.moe.capacity_factor=none is not a number or None; did you mean None?"),
        (
            ["--model.attention.window-pattern", "8", "x"],
            "model.attention.window_pattern=x is not a whole number; give it as in --model.attention.window-pattern 16 -1",
        ),
        (
            ["--model.moe", "None"],
            "model.moe is a group of settings; set its members, such as --model.moe.num-experts, or change it in the config file",
        ),
        (
            ["--data", "synthetic"],
            "data is a group of settings; did you mean --data.source synthetic?",
        ),
    ],
)
def test_unknown_names_and_wrong_values_are_refused_in_one_sentence(words: list[str], message: str) -> None:
    assert refusal(*words) == message


def test_settings_of_an_absent_group_are_explained() -> None:
    message = refusal("--model.moe.num-experts", "8", config="shakespeare_dense")
    assert message.startswith("model.moe.num_experts cannot be set: this config has model.moe=None; give model.moe in the config file")


def test_p33_misspelled_enums_are_refused() -> None:
    names = set()
    for setting in settings(BASE):
        for word in choices(setting.hint):
            names.add(setting.name)
            typo = word + word[-1]
            expected = f"{setting.name}={typo} is not one of {', '.join(choices(setting.hint))}; did you mean {word}?"
            assert refusal(f"--{setting.name}", typo) == expected
            with pytest.raises(ConfigError) as caught:
                change(BASE, {setting.name: typo})
            assert str(caught.value) == expected
    assert len(names) == 16


def test_help_tells_meaning_and_value_of_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    print_help(BASE, prog="moejax train tiny_cpu", description="What it is.")
    text = " ".join(capsys.readouterr().out.translate(str.maketrans("│─╭╮╰╯", "      ")).split())
    for name in possible_names(type(BASE)):
        assert f"--{name.replace('_', '-')} " in text
    assert "What it is." in text
    assert "--model.moe.num-experts INT Routed experts of a layer, split over mesh.ep. (default: 8)" in text
