"""How the time for choosing is spent."""

import pytest

from draftsmith.decode.errors import InputError
from draftsmith.scripts.choose import sweep as module
from draftsmith.scripts.choose.config import ChooseConfig
from draftsmith.scripts.choose.forecast import Trial
from draftsmith.scripts.choose.sweep import Sweep, commands_in_turns, survivors
from draftsmith.scripts.stages import Stages

COMMANDS = {"slow": "distill", "heads": "medusa", "other": "distill"}


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """A sweep of 100 seconds for choosing; trials take the seconds in `took`, or fail with the error there."""
    candidates = {name: {"command": command} for name, command in COMMANDS.items()}
    config = ChooseConfig(target="t", prompts="p", output=str(tmp_path), budget="200s")
    made = Sweep(config, candidates, tmp_path, [None] * 1000, Stages(tmp_path), texts=["1"], used=10, amounts=[1000])
    made.took = {"slow": 90.0, "heads": 20.0, "other": 25.0}

    def trial(self, name):
        if isinstance(self.took[name], Exception):
            raise self.took[name]
        self.stages.seconds[f"{len(self.texts)}-{name}"] = self.took[name]
        return Trial(name, self.amounts[-1], self.took[name] - 2.0, 2.0, {})

    monkeypatch.setattr(Sweep, "trial", trial)
    return made


def test_all_learn_from_two_amounts_then_half_then_two():
    assert [survivors(amount, 8) for amount in (1, 2, 3, 4)] == [8, 8, 4, 2]
    assert [survivors(amount, 5) for amount in (1, 2, 3, 4)] == [5, 5, 3, 2]
    assert [survivors(amount, 1) for amount in (1, 2, 3, 4)] == [1, 1, 1, 1]


def test_each_command_has_a_trial_before_any_has_a_second(sweep):
    assert commands_in_turns(sweep.candidates) == ["slow", "heads", "other"]
    sweep.took["slow"] = 60.0
    assert sweep.try_all(["slow", "heads", "other"]) == ["slow", "heads"]
    assert sweep.failed.keys() == {"other"} and "no time" in sweep.failed["other"]


@pytest.mark.parametrize("amount", [1, 2])
def test_a_candidate_whose_training_fails_is_left_out(sweep, amount):
    sweep.took["slow"] = 1.0
    if amount == 2:
        sweep.try_all(["slow", "heads"])
        sweep.texts.append("2")
    sweep.took["heads"] = RuntimeError("out of memory\nand much else")
    assert sweep.try_all(["slow", "heads"]) == ["slow"]
    assert sweep.failed["heads"].endswith(f"its training failed on amount {amount}: out of memory")
    assert sweep.dropped == ({"heads": 1} if amount == 2 else {})
    assert sweep.trials.keys() == ({"slow", "heads"} if amount == 2 else {"slow"})


def test_an_error_ends_the_choice_if_all_trainings_fail(sweep):
    sweep.took = dict.fromkeys(COMMANDS, InputError("heads: expected some"))
    with pytest.raises(InputError, match="heads: expected some"):
        sweep.try_all(list(COMMANDS))


@pytest.mark.parametrize(
    ("left", "prompts", "factor"),
    [
        (1e9, 10**6, 6),
        (1e9, 80, 2),  # three times twice as many prompts
        (1e9, 39, 3),  # too few prompts for more than one further amount
        (1e9, 19, None),
        # With a factor of 2 a trial of 1 + 2 seconds takes 2 + 2, then 4 + 2, then 8 + 2.
        (3 * 4 + 2 * 6 + 2 * 10, 10**6, 2),
        (3 * 4 + 2 * 6 + 2 * 10 - 1, 10**6, 3),  # two further amounts
        (3 * 4, 10**6, 2),  # one
        (3 * 4 - 1, 10**6, None),
    ],
)
def test_text_grows_as_much_as_time_and_prompts_allow(sweep, left, prompts, factor):
    sweep.took, sweep.train = dict.fromkeys(COMMANDS, 3.0), range(prompts)
    sweep.try_all(list(COMMANDS))
    sweep.stages.seconds = {"before": sweep.seconds - left}
    assert sweep.growth(list(COMMANDS), 3) == factor


@pytest.mark.parametrize(
    ("budget", "compiled", "expected"), [("4m", None, False), ("1h", None, None), ("4m", True, True)]
)
def test_nothing_is_compiled_without_time_for_it(sweep, monkeypatch, budget, compiled, expected):
    asked, costs = [], {"environment": {}, "compiled": False, "tables": []}
    monkeypatch.setattr(module, "measured_costs", lambda *given: asked.append(given[3]) or costs)
    sweep.config.budget, sweep.config.compiled = budget, compiled
    sweep.try_all(["heads"])
    assert sweep.costs() == costs and asked == [expected]


def test_the_winner_learns_as_much_as_the_rest_of_the_budget_allows(sweep):
    sweep.took["heads"] = 12.0  # ten for a thousand tokens
    sweep.try_all(["heads"])
    assert sweep.reach("heads") == pytest.approx(100 * (100 - 2))
    sweep.stages.seconds["text-1"] = 10.0  # as much again to write them
    assert sweep.reach("heads") == pytest.approx(((100 - 2) + 10) / 0.02)
    sweep.train = range(30)
    assert sweep.reach("heads") == 3000
    sweep.stages.seconds["late"] = 1000.0
    assert sweep.reach("heads") == 1000
