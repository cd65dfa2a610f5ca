"""Divergences over a few tokens, against sums over whole distributions in double precision."""

import math

import pytest

torch = pytest.importorskip("torch")

from whet_ops.distillation import topk_divergences, topk_jensen_shannon  # noqa: E402


def distributions(seed=0, places=5, vocabulary=11):
    draw = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(places, vocabulary, generator=draw, dtype=torch.float64) for _ in range(2))
    return torch.log_softmax(2 * p, -1), torch.log_softmax(2 * q, -1)


def kl(log_a, log_b):
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def at_top(log_p, log_q, k):
    ids = log_q.topk(k).indices
    return log_p.gather(1, ids), log_q.gather(1, ids)


@pytest.mark.parametrize("outside", ["renormalise", "ignore", "rest"])
def test_all_tokens_give_the_divergence_of_whole_distributions(outside):
    log_p, log_q = distributions()
    forward, reverse = topk_divergences(*at_top(log_p, log_q, 11), outside)
    torch.testing.assert_close(forward.double(), kl(log_q, log_p), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(reverse.double(), kl(log_p, log_q), atol=2e-5, rtol=1e-5)


def test_the_rest_is_left_out_renormalised_or_one_more_token():
    log_p, log_q = distributions(1)
    p, q = at_top(log_p, log_q, 4)
    cases = {
        "ignore": (p, q),
        "renormalise": (torch.log_softmax(p, -1), torch.log_softmax(q, -1)),
        "rest": tuple(torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1) for x in (p, q)),
    }
    for outside, (one, other) in cases.items():
        forward, reverse = topk_divergences(p, q, outside)
        torch.testing.assert_close(forward.double(), kl(other, one), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(reverse.double(), kl(one, other), atol=1e-5, rtol=1e-5)


def test_zero_takes_the_rest_of_the_student_against_nearly_nothing():
    log_p, log_q = distributions(2)
    ids = log_q.topk(4).indices
    teacher = torch.full_like(log_q, -100.0).scatter(1, ids, torch.log_softmax(log_q.gather(1, ids), -1))
    entropy = -(log_p.exp() * log_p).sum(-1)
    forward, reverse = topk_divergences(*at_top(log_p, log_q, 4), "zero", entropy)
    torch.testing.assert_close(reverse.double(), (log_p.exp() * (log_p - teacher)).sum(-1), atol=1e-3, rtol=1e-5)
    inside = teacher.gather(1, ids)
    expected = (inside.exp() * (inside - log_p.gather(1, ids))).sum(-1)
    torch.testing.assert_close(forward.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_with_the_rest_divergences_are_between_0_and_that_of_all_tokens(seed):
    log_p, log_q = distributions(seed)
    for k in (1, 3, 8):
        forward, reverse = topk_divergences(*at_top(log_p, log_q, k), "rest")
        for found, whole in ((forward, kl(log_q, log_p)), (reverse, kl(log_p, log_q))):
            assert (found >= -1e-6).all()
            assert (found <= whole + 1e-5).all()


def test_the_rest_is_not_lost_in_rounding_where_a_teacher_is_nearly_certain():
    """Rounded, K float32 probabilities may sum to 1 or more."""
    generator = torch.Generator().manual_seed(0)
    for outside in (1e-8, 1e-5, 1e-4):
        teacher = torch.randn(200, 64, dtype=torch.float64, generator=generator).mul(3).log_softmax(-1)
        teacher = teacher + math.log1p(-outside)
        student = torch.randn(200, 64, dtype=torch.float64, generator=generator).log_softmax(-1) + math.log(0.7)
        exact = (student.exp() * (student - teacher)).sum(-1) + 0.3 * (math.log(0.3) - math.log(outside))
        _, reverse = topk_divergences(student.float(), teacher.float(), "rest")
        assert (reverse.double() <= exact + 0.02).all()
        assert outside < 1e-7 or torch.allclose(reverse.double(), exact, atol=0.02)


@pytest.mark.parametrize("outside", ["renormalise", "zero", "ignore", "rest"])
def test_certain_and_impossible_tokens_stay_finite_with_their_gradients(outside):
    student = torch.tensor([[0.0, -50.0, -math.inf], [-math.inf, -50.0, 0.0], [-40.0, -50.0, -60.0]])
    teacher = torch.tensor([[-math.inf, 0.0, -50.0], [0.0, -50.0, -math.inf], [0.0, -1e-9, -50.0]])
    student.requires_grad_()
    entropy = torch.tensor([0.0, 1e-3, 5.0], requires_grad=True)
    forward, reverse = topk_divergences(student, teacher, outside, entropy)
    assert torch.isfinite(forward).all()
    assert torch.isfinite(reverse).all()
    (slope,) = torch.autograd.grad((forward + reverse).sum(), [student])
    assert torch.isfinite(slope).all()


def test_equal_distributions_have_none_and_shapes_must_agree():
    log_p, _ = distributions(3)
    for outside in ("renormalise", "ignore", "rest"):
        forward, reverse = topk_divergences(log_p, log_p, outside)
        torch.testing.assert_close(forward + reverse, torch.zeros(5), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match=r"wanted student and teacher \[M, K\]"):
        topk_divergences(log_p, log_p[:, :3])


def gkd(log_p, log_q, beta):
    """The generalised divergence of GKD as TRL computes it, p being the student's and q the teacher's."""
    mixture = torch.logsumexp(torch.stack([log_p + math.log(1 - beta), log_q + math.log(beta)]), 0)
    kl_teacher = torch.nn.functional.kl_div(mixture, log_q, reduction="none", log_target=True)
    kl_student = torch.nn.functional.kl_div(mixture, log_p, reduction="none", log_target=True)
    return (beta * kl_teacher + (1 - beta) * kl_student).sum(-1)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.8])
def test_jensen_shannon_is_that_of_gkd(beta):
    log_p, log_q = distributions(4)
    log_p.requires_grad_()
    found = topk_jensen_shannon(*at_top(log_p, log_q, 11), beta)
    torch.testing.assert_close(found.double(), gkd(log_p, log_q, beta), atol=1e-6, rtol=1e-5)
    ours, theirs = (torch.autograd.grad(x.sum(), log_p)[0] for x in (found, gkd(log_p.log_softmax(-1), log_q, beta)))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_jensen_shannon_over_few_tokens_against_whole_distributions():
    log_p, log_q = distributions(5)
    p, q = at_top(log_p, log_q, 4)
    ids = log_q.topk(4).indices
    only = torch.full_like(log_q, -200.0).scatter(1, ids, torch.log_softmax(q, -1))
    renormalised = [torch.log_softmax(x, -1) for x in (p, q)]
    close = {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(topk_jensen_shannon(p, q, 0.3).double(), gkd(*renormalised, 0.3), **close)
    torch.testing.assert_close(topk_jensen_shannon(p, q, 0.3, "zero").double(), gkd(log_p, only, 0.3), **close)
    rest = topk_jensen_shannon(p, q, 0.3, "rest").double()
    assert (rest >= 0).all()
    assert (rest <= gkd(log_p, log_q, 0.3) + 1e-6).all()


def test_jensen_shannon_of_what_one_of_them_cannot_say_is_finite():
    student, teacher = torch.tensor([[-math.inf, 0.0]]), torch.tensor([[0.0, -math.inf]])
    assert float(topk_jensen_shannon(student, teacher, 0.5)) == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="between 0 and 1, found 1"):
        topk_jensen_shannon(student, teacher, 1.0)


TRL = {
    # beta: the loss, its gradient at the first token's logits, and the loss at a temperature of 0.9
    0.0: (1.1137787, [-0.2984120, 0.2194358, 0.0996592, -0.0044173, -0.0162657], 1.3414644),
    0.3: (0.1967001, [-0.0379054, 0.0284991, 0.0143667, -0.0017350, -0.0032254], 0.2291123),
    0.5: (0.2252387, [-0.0385720, 0.0289131, 0.0158372, -0.0024375, -0.0037408], 0.2614833),
    1.0: (0.9521568, [-0.1342780, 0.0882809, 0.0765833, -0.0145383, -0.0160478], 1.1237547),
}
"""What `GKDTrainer.generalized_jsd_loss` of TRL 1.16.0 gave, of the first and the third of three tokens."""


@pytest.mark.parametrize("beta", TRL)
def test_they_give_the_numbers_that_trls_gkd_gave(beta):
    number = torch.arange(15.0).view(3, 5)[[0, 2]]
    student, teacher = 2 * torch.sin(1.3 * number), 2 * torch.cos(0.7 * number + 1)

    def loss(logits, temperature=1.0):
        pair = (torch.log_softmax(logits / temperature, -1) for logits in (logits, teacher))
        if 0 < beta < 1:
            return topk_jensen_shannon(*pair, beta).mean()
        return topk_divergences(*pair)[int(beta)].mean()

    value, gradient, warm = TRL[beta]
    student.requires_grad_()
    found = loss(student)
    assert float(found.detach()) == pytest.approx(value, rel=1e-5)
    (slope,) = torch.autograd.grad(found, student)
    assert slope[0].tolist() == pytest.approx(gradient, abs=2e-6)
    assert float(loss(student.detach(), 0.9)) == pytest.approx(warm, rel=1e-5)
