"""What is said of the step that is kept."""

from draftsmith.train.job.kept_step import KeptStep


def test_a_step_before_training_that_is_better_is_named():
    log = [{"step": step, "eval_alpha": alpha} for step, alpha in ((0, 0.75), (4, 0.5), (8, 0.25))]
    kept = KeptStep.of(4, 8, "alpha", True, log)
    assert str(kept) == "step 4 of 8: alpha 0.500 on held-out text; the best that was measured, step 0, had 0.750"
    assert KeptStep.of(8, 8, "alpha", False, log).best_step == 8
