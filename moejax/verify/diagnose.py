"""What a difference looks like, in words: where it shows and where not, and which simple mistake makes exactly these numbers."""

from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np

from moejax.verify.cases import SETTINGS, Case
from moejax.verify.compare import LIMITS, Difference
from moejax.verify.reference import LOSSES, Truth

_NEAR = 1e-3  # how exactly a mistake has to explain the numbers


def signs(case: Case, differences: tuple[Difference, ...], gradients: dict[str, np.ndarray], truth: Truth) -> list[str]:
    """Sentences on one case; none if the numbers fit no simple mistake."""
    return [*_drop_signs(differences, truth), *_gradient_signs(case, differences, gradients, truth)]


def where_it_shows(wrong: list[Case], right: list[Case]) -> str:
    """One sentence that tells the cases that differ from those that do not, by one setting or two if that is enough."""
    if not right:
        has_one = any(case.pp * case.dp * case.ep == 1 for case in wrong)
        return f"it differs in every case{', on one device too' * has_one}: look at what they share, such as layers and losses"
    facts = dict(_facts([*wrong, *right]))
    for size in (1, 2):
        for names in combinations(facts, size):
            if all(all(facts[name](case) for name in names) == (case in wrong) for case in (*wrong, *right)):
                words = " and ".join(names)
                return f"it shows exactly where {words}"
    shared = [name for name, holds in facts.items() if all(holds(case) for case in wrong)]
    return f"it shows only where {' and '.join(shared)}, though not in all such cases" if shared else "no one setting tells where it shows"


def _facts(cases: list[Case]) -> Iterator[tuple[str, Callable[[Case], bool]]]:
    """Statements on cases that hold for some of them and not for others, general ones first."""
    exact = []
    for name, setting in SETTINGS.items():
        values = {getattr(case, name) for case in cases}
        simplest = next((v for v in (1, "none", "resident", "auto") if v in values), None)
        if len(values) > 1 and simplest is not None:
            words = f"{setting} is above 1" if simplest == 1 else f"{setting} is not {simplest}"
            yield words, lambda case, n=name, v=simplest: getattr(case, n) != v
            exact.append((f"{setting}={simplest}", name, simplest))
        exact += [(f"{setting}={value}", name, value) for value in sorted(values - {simplest}, key=str) if len(values) > 1]
    for words, name, value in exact:
        yield words, lambda case, n=name, v=value: getattr(case, n) == v


def _drop_signs(differences: tuple[Difference, ...], truth: Truth) -> Iterator[str]:
    # What one layer drops changes what the next ones see, and how they route.
    spoilt = min((d.layer or 0 for d in differences if d.kind == "routes"), default=None)
    drops = [d for d in differences if d.kind == "drops" and (spoilt is None or (d.layer or 0) < spoilt)]
    if not drops or truth.report is None:
        return
    extra = np.array([d.got - d.expected for d in drops])
    ranks = np.array([truth.report.overfull[d.layer] for d in drops])
    if np.array_equal(np.abs(extra), ranks) and len(set(np.sign(extra))) == 1:
        how = "less" if extra[0] > 0 else "more"
        yield f"every rank that drops takes exactly one row {how} than its capacity: off by one where the tail is cut"


def _gradient_signs(case: Case, differences: tuple[Difference, ...], gradients: dict[str, np.ndarray], truth: Truth) -> Iterator[str]:
    if any(d.kind in ("routes", "drops") for d in differences):
        return
    wrong = list(dict.fromkeys(d.what for d in differences if d.kind == "gradient"))
    if not wrong:
        return
    error = {name: gradients[name].astype(np.float64) - truth.gradients["total"][name] for name in wrong}
    factor = _factor(error, {name: truth.gradients["total"][name] for name in wrong})
    if factor is not None:
        whose = "gradients of routed experts" if all(".experts." in name for name in wrong) else f"gradients of {', '.join(wrong)}"
        yield f"{whose} are {1 + factor:.4g} times what they should be{_known_factor(1 + factor, case)}"
        return
    for losses in (*((loss,) for loss in LOSSES), ("balance loss", "router z-loss")):
        part = {name: np.sum([truth.gradients[loss][name] for loss in losses], axis=0) for name in wrong}
        loss = " and the ".join(losses)
        if (times := _factor(error, part)) is not None and abs(times) > 0.01:
            if abs(times + 1) < _NEAR:
                yield f"exactly the gradient of the {loss} is missing: detached on its way"
            elif abs(times - 1) < _NEAR:
                yield f"exactly the gradient of the {loss} is there twice: counted again on its way"
            else:
                yield f"the gradient of the {loss} is {1 + times:.4g} times what it should be{_known_factor(1 + times, case)}"
            return
    if case.microbatches > 1 and not any(d.kind == "loss" for d in differences):
        held = "pipeline slots" if case.pp > 1 else "kept results"
        yield (
            "losses are right and gradients no multiple of anything: the backward pass reads what belongs to something else, such as "
            f"{held} of another microbatch (a stale slot) or of another layer"
        )


def _factor(error: dict[str, np.ndarray], part: dict[str, np.ndarray]) -> float | None:
    """c such that error = c * part in all arrays, if there is one."""
    flat_error, flat_part = (np.concatenate([a.reshape(-1) for a in tree.values()]) for tree in (error, part))
    size = float(flat_part @ flat_part)
    if size == 0:
        return None
    factor = float(flat_error @ flat_part) / size
    rest = np.linalg.norm(flat_error - factor * flat_part)
    allowed = _NEAR * np.linalg.norm(flat_error) + LIMITS.leaf * np.sqrt(size)
    return factor if rest <= allowed and abs(factor) > 10 * LIMITS.leaf else None


def _known_factor(factor: float, case: Case) -> str:
    """Where such a factor would come from."""
    if abs(factor) < _NEAR:
        return ": they are not computed at all"
    if abs(factor + 1) < _NEAR:
        return ": the sign is wrong"
    counts = {"mesh.ep": case.ep, "mesh.dp": case.dp, "mesh.pp": case.pp, "microbatches": case.microbatches}
    counts["mesh.dp x mesh.ep"] = case.dp * case.ep
    for name, count in counts.items():
        if count > 1 and abs(factor * count - 1) < _NEAR:
            return f", 1 / {name}: divided once too often"
        if count > 1 and abs(factor / count - 1) < _NEAR:
            return f", which is {name}: added up or multiplied once too often"
    return ": counted twice" if abs(factor - 2) < _NEAR else ""
