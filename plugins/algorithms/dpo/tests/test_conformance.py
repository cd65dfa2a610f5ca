import numpy as np

from whet.component import Selection
from whet_dpo import loss_config as config
from whet_dpo import losses, unpaired, weighted_sum, whole_config, whole_losses
from whet_dpo.hooks import whet_losses
from whet_testing.contracts.algorithm import RECORDS, AlgorithmContract
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.loss import LossContract


class TestPlugin(ComponentContract):
    hooks = "whet_dpo.hooks"


class TestDpoLoop(AlgorithmContract):
    use = "dpo"
    document = {"batch_size": 4}


class TestDpoLoopOnTheFly(AlgorithmContract):
    use = "dpo"
    document = {"batch_size": 4, "reference": "on-the-fly", "loss": {"use": "ipo"}}


class TestDpoLoopWithoutReference(AlgorithmContract):
    use = "dpo"
    document = {"batch_size": 4, "loss": {"use": "simpo"}}


class TestOrpoLoopOfWholeConversations(AlgorithmContract):
    use = "dpo"
    document = {"batch_size": 4, "loss": {"use": "orpo", "sft": {"of": "conversation", "weight": 1.0}}}


class TestKtoLoop(AlgorithmContract):
    use = "kto"
    document = {"batch_size": 4}
    records = [{"prompt": f"{i}+1?", "completion": f"{i + 1}", "label": i % 3 == 0} for i in range(20)]


class TestKtoLoopOnPairs(AlgorithmContract):
    use = "kto"
    document = {"batch_size": 4, "baseline": "none"}
    records = RECORDS["pairs"]


class TestDpoLoopThatSorts(AlgorithmContract):
    use = "dpo"
    document = {"batch_size": 4, "loss": {"use": "aot-unpaired"}}


class TestDpoLoopWithRunningShift(AlgorithmContract):
    use = "dpo"
    document = {"batch_size": 4, "loss": {"use": "weighted-sum"}}


class TestKtoLoopWithShift(AlgorithmContract):
    use = "kto"
    document = {"batch_size": 4, "loss": {"use": "bco", "shift": "running"}}
    records = TestKtoLoop.records


class PairContract(LossContract):
    unit_size = 2
    makes = losses.Dpo(config.DpoLossConfig())

    def make(self):
        return self.makes


class TestDpo(PairContract):
    pass


class TestDpoWithEverything(PairContract):
    sft = config.SftTerm(weight=0.3, average="sequence")
    makes = losses.Dpo(config.DpoLossConfig(beta=0.5, average_logprobs=True, sft=sft, label_smoothing=0.1))


class TestOrpoOfWholeConversations(PairContract):
    makes = losses.Orpo(config.OrpoConfig(sft=config.SftTerm(weight=1.0, of="conversation")))
    makers = {"response_mask": lambda batch, rng: batch["loss_mask"] & (rng.random(batch.tokens) < 0.6)}


class TestRobustDpo(PairContract):
    makes = losses.RobustDpo(config.RobustDpoConfig())


class TestIpo(PairContract):
    makes = losses.Ipo(config.IpoConfig())


class TestIpoOfWholeAnswers(PairContract):
    makes = losses.Ipo(config.IpoConfig(average_logprobs=False, sft=config.SftTerm(weight=1.0, average="none")))


class TestHinge(PairContract):
    makes = losses.Hinge(config.HingeConfig())


class TestApoZero(PairContract):
    makes = losses.ApoZero(config.ApoZeroConfig())


class TestApoDown(PairContract):
    makes = losses.ApoDown(config.ApoDownConfig())


class TestSimpo(PairContract):
    makes = losses.Simpo(config.SimpoConfig())


class TestOrpo(PairContract):
    makes = losses.Orpo(config.OrpoConfig())


class TestKto(LossContract):
    makers = {
        "desirable": lambda batch, rng: rng.random(batch.sequences) < 0.5,
        "kl_baseline": lambda batch, rng: np.full(batch.sequences, 0.7, np.float32),
    }

    def make(self):
        return unpaired.Kto(config.KtoLossConfig(desirable_weight=1.3, undesirable_weight=0.7))

    def goal(self, batch):
        return np.where(batch["desirable"], 1, -1)


class TestKtoByKinds(TestKto):
    def make(self):
        return unpaired.Kto(config.KtoLossConfig(desirable_weight=1.3, average="kinds"))


class TestKtoOnPairs(TestKto):
    unit_size = 2
    makers = {**TestKto.makers, "desirable": lambda batch, rng: np.diff(batch["unit"], prepend=-1) != 0}


class TestExoPair(PairContract):
    makes = losses.ExoPair(config.ExoPairConfig())


class TestDiscopop(PairContract):
    makes = losses.Discopop(config.DiscopopConfig())

    def goal(self, batch):
        """Demand nothing: at equal logprobs the loss falls with the margin."""


class TestNcaPair(PairContract):
    makes = losses.NcaPair(config.NcaPairConfig())


class TestSppoHard(PairContract):
    makes = losses.SppoHard(config.SppoHardConfig())


class TestCpo(PairContract):
    makes = losses.Cpo(config.CpoConfig())


class TestCpoOfIpo(PairContract):
    makes = losses.Cpo(config.CpoConfig(loss_type="ipo"))


class TestForwardKl(PairContract):
    makes = losses.Dpo(config.DpoLossConfig(divergence="forward-kl"))


class TestJensenShannon(PairContract):
    makes = losses.Hinge(config.HingeConfig(divergence="jensen-shannon"))


class TestAlphaDivergence(PairContract):
    makes = losses.Ipo(config.IpoConfig(divergence="alpha", divergence_alpha=0.8))


class TestSharedLength(PairContract):
    makes = losses.Dpo(config.DpoLossConfig(ld_alpha=0.3, average_logprobs=True))


class TestSft(PairContract):
    makes = losses.Sft(config.SftLossConfig())

    def goal(self, batch):
        return np.diff(batch["unit"], prepend=-1) != 0


class TestSftByAnswer(TestSft):
    makes = losses.Sft(config.SftLossConfig(average="sequence"))


class TestSftOfWholeConversations(TestSft):
    makes = losses.Sft(config.SftLossConfig(of="conversation"))
    makers = TestOrpoOfWholeConversations.makers


def of_pairs(scale):
    """Make a column of one number for each pair."""

    def make(batch, rng):
        numbers = rng.normal(size=int(batch["unit"].max(initial=0)) + 1).astype(np.float32) * scale
        return numbers[batch["unit"]]

    return make


class TestBcoPair(PairContract):
    makes = whole_losses.BcoPair(whole_config.BcoPairConfig())
    makers = {whole_config.SHIFT: lambda batch, rng: np.full(batch.sequences, 0.7, np.float32)}


class TestBcoPairWithoutShift(PairContract):
    makes = whole_losses.BcoPair(whole_config.BcoPairConfig(shift="none", sft=config.SftTerm(0.5)))


class TestAot(PairContract):
    makes = whole_losses.Aot(whole_config.AotConfig(label_smoothing=0.1))
    makers = {whole_config.MARGIN_SHIFT: of_pairs(2.0)}


class TestAotUnpaired(PairContract):
    makes = whole_losses.AotUnpaired(whole_config.AotUnpairedConfig(ld_alpha=0.5))
    makers = {whole_config.MATCHED: lambda batch, rng: rng.normal(size=batch.sequences).astype(np.float32)}


class TestBco(TestKto):
    makers = {**TestKto.makers, whole_config.SHIFT: TestBcoPair.makers[whole_config.SHIFT]}

    def make(self):
        return unpaired.Bco(whole_config.BcoConfig(desirable_weight=1.3, average="kinds"))


class TestBcoWithoutShiftOnPairs(TestKtoOnPairs):
    def make(self):
        return unpaired.Bco(whole_config.BcoConfig(shift="none"))


def term(name, weight=1.0, label="", **keys):
    """Choose a loss as a term of a sum."""
    component = next(component for component in whet_losses() if component.name == name)
    chosen = Selection("losses", component, component.config(**keys))
    return whole_config.SumTerm(component=chosen, weight=weight, name=label)


class TestMpo(PairContract):
    makes = weighted_sum.WeightedSum(whole_config.WeightedSumConfig())
    makers = TestBcoPair.makers


class TestSumOfEverything(PairContract):
    makes = weighted_sum.WeightedSum(
        whole_config.WeightedSumConfig(
            [
                term("dpo", 0.5, sft=config.SftTerm(0.3, "sequence")),
                term("dpo", 0.2, "by token", average_logprobs=True),
                term("aot", 2.0),
                term("aot-unpaired"),
                term("simpo", 0.0),
            ]
        )
    )
    makers = {**TestAot.makers, **TestAotUnpaired.makers}
