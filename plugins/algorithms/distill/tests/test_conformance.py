import numpy as np

from whet_distill.config import FullKlConfig, SampleKlConfig, TeacherPgConfig, TopkKlConfig
from whet_distill.losses import FullKl, SampleKl, TeacherPg, TopkKl
from whet_testing.contracts.algorithm import AlgorithmContract
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.loss import LossContract

K = 3


class TestPlugin(ComponentContract):
    hooks = "whet_distill.hooks"


class TestDistillLoop(AlgorithmContract):
    use = "distill"
    document = {"prompts_per_step": 4, "topk": K}


class TestDistillLoopOnTheStudentsTokens(AlgorithmContract):
    use = "distill"
    document = {"prompts_per_step": 4, "topk": K, "topk_of": "student", "group_size": 2, "minibatches": 2}


class TestDistillLoopWithAdvantages(AlgorithmContract):
    use = "distill"
    document = {"prompts_per_step": 4, "loss": {"use": "teacher-pg"}, "minibatches": 2, "count_over": "batch"}


class TestDistillLoopOverTheVocabulary(AlgorithmContract):
    use = "distill"
    document = {"prompts_per_step": 4, "loss": {"use": "full-kl"}}


class TestDistillLoopAgainstTheTrainer(AlgorithmContract):
    use = "distill"
    document = {"prompts_per_step": 4, "loss": "teacher-pg", "old_logprobs": "trainer", "minibatches": 2}


class TestDistillLoopByJensenShannon(AlgorithmContract):
    use = "distill"
    document = {"prompts_per_step": 4, "loss": {"use": "full-kl", "divergence": "jensen-shannon", "beta": 0.3}}


class TestDistillLoopAtTheSampledToken(AlgorithmContract):
    use = "distill"
    document = {"prompts_per_step": 4, "loss": "sample-kl", "minibatches": 2}


class TestDistillDataLoopAtTheTokenOfTheData(AlgorithmContract):
    use = "distill-data"
    document = {"batch_size": 4, "loss": "sample-kl"}


class TestDistillDataLoop(AlgorithmContract):
    use = "distill-data"
    document = {"batch_size": 4, "topk": K}


def _teacher(batch, rng):
    logits = rng.normal(size=(batch.tokens, K + 2))
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True)))[:, :K].astype(np.float32)


class TopkContract(LossContract):
    makers = {
        "topk_ids": lambda batch, rng: np.tile(np.arange(K, dtype=np.int32), (batch.tokens, 1)),
        "teacher_topk_logprobs": _teacher,
    }

    def outputs(self, batch, seed=0):
        made = super().outputs(batch, seed)
        at = _teacher(batch, np.random.default_rng(seed + 1))
        return {**made, "logprobs_at": np.where(batch["loss_mask"][:, None], at, 0).astype(np.float32)}


class TestTopkKl(TopkContract):
    def make(self):
        return TopkKl(TopkKlConfig())


class TestMixedTopkKl(TopkContract):
    def make(self):
        return TopkKl(TopkKlConfig(forward=0.3, outside="rest", likelihood=0.5))


class TestReverseTopkKlAgainstNothing(TopkContract):
    def make(self):
        return TopkKl(TopkKlConfig(forward=0.0, outside="zero"))


class TestJensenShannonOverTheLikeliest(TopkContract):
    def make(self):
        return TopkKl(TopkKlConfig(divergence="jensen-shannon", beta=0.3))


class TestJensenShannonAgainstNothing(TopkContract):
    def make(self):
        return TopkKl(TopkKlConfig(divergence="jensen-shannon", beta=0.7, outside="zero", likelihood=0.5))


class TestJensenShannonOverTheVocabulary(LossContract):
    def make(self):
        return FullKl(FullKlConfig(divergence="jensen-shannon", beta=0.25))


class TestFullKl(LossContract):
    def make(self):
        return FullKl(FullKlConfig(forward=0.4, likelihood=0.1))


class TestTopkKlBySequence(TopkContract):
    def make(self):
        return TopkKl(TopkKlConfig(aggregation="sequence", likelihood=0.5))


class TestFullKlByAConstant(LossContract):
    optional_columns = ("version",)

    def make(self):
        return FullKl(FullKlConfig(aggregation="constant", max_length=9, count_empty=True, likelihood=0.1))


class TestSampleKl(LossContract):
    makers = {
        "teacher_logprobs": lambda batch, rng: (batch["loss_mask"] * rng.normal(-2, 1, batch.tokens)).astype("f4")
    }

    def make(self):
        return SampleKl(SampleKlConfig())


class TestSampleKlBySequence(TestSampleKl):
    def make(self):
        return SampleKl(SampleKlConfig(estimator="abs", aggregation="sequence"))


class TestTeacherPgBySequence(LossContract):
    optional_columns = ("old_logprobs",)

    def make(self):
        return TeacherPg(TeacherPgConfig(aggregation="sequence"))


class TestTeacherPg(LossContract):
    optional_columns = ("old_logprobs",)

    def make(self):
        return TeacherPg(TeacherPgConfig(clip_advantages=2.0))
