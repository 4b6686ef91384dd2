"""What `moejax verify` prints."""

from moejax.config import TrainConfig
from moejax.verify.diagnose import where_it_shows
from moejax.verify.verifier import Outcome, Verifier

_COLUMNS = f"{'loss':>8} {'balance':>8} {'gradient':>8} {'drops':>6}"


def heading(config: TrainConfig, verifier: Verifier, cases: int) -> list[str]:
    """What is verified, and the names of the columns."""
    model, moe = verifier.small.model, verifier.small.model.moe
    experts = f", {moe.num_experts} experts, top-{moe.top_k}" if moe else ""
    return [
        f"{config.name} as {model.num_dense_layers} dense and {model.num_moe_layers} MoE blocks of width {model.embed_dim}{experts}; "
        f"{verifier.small.batch_size} x {verifier.small.data.seq_len} tokens, float32; model {verifier.seed} whose routes are clear",
        f"{cases} cases against the dense float64 reference; largest relative errors (drops: routes too many or too few)",
        "",
        f"{_COLUMNS}  {'':7}  case",
    ]


def line(outcome: Outcome) -> str:
    """One row of the table."""
    if outcome.errors is None:
        return f"{'refused':>33}  {'':7}  {outcome.case.words}: {outcome.refusal}"
    e = outcome.errors
    word = "DIFFERS" if outcome.differs else "ok"
    return f"{e.loss:>8.0e} {e.balance:>8.0e} {e.gradient:>8.0e} {e.drops:>6}  {word:7}  {outcome.case.words}"


def verdict(outcomes: list[Outcome]) -> list[str]:
    """How it came out, and if something differs, the first thing that does and what it looks like."""
    wrong = [outcome for outcome in outcomes if outcome.differs]
    refused = [outcome for outcome in outcomes if outcome.refusal]
    right = [outcome.case for outcome in outcomes if outcome.errors and not outcome.differs]
    lines = ["", f"{len(right)} of {len(outcomes)} cases are equal to the reference" + (f", {len(refused)} refused" if refused else "")]
    if not wrong:
        return lines
    first = min(wrong, key=lambda outcome: (not outcome.signs, len(outcome.case.words)))
    assert first.errors is not None
    difference = first.errors.differences[0]
    lines += [
        f"first difference, in the simplest case that shows it ({first.case.words}):",
        f"  {difference.kind}: {difference.where}: got {difference.got:.7g}, expected {difference.expected:.7g}, "
        f"relative error {difference.error:.1e}; {len(first.errors.differences)} differences in all",
        f"  {where_it_shows([outcome.case for outcome in wrong], right)}",
    ]
    return lines + [f"  looks like: {sign}" for sign in first.signs]
