"""Losses, each a small function of logits with its paper."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from training.data.batches import UNLABELLED, LabelledBatch, TaughtBatch
from training.settings.distillation import DistillationSettings

EPSILON = 1e-8
"""Added to the product of norms, as by DIST's authors: keeps a correlation with constant values finite."""


def distillation_loss(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    batch: LabelledBatch | TaughtBatch,
    settings: DistillationSettings,
) -> dict[str, torch.Tensor]:
    """The teacher's part of the loss by `settings.method`: named scalars that add up to it.

    The scalars already include the paper's own weights (DKD's alpha and beta, DIST's beta and gamma). With
    `standardize_logits` both models' logits are standardised first; `temperature` is then the paper's base temperature.

    Args:
        student_logits, teacher_logits: (batch, classes), of any floating-point type.
        batch: its labels, for DKD. An unlabelled image takes the teacher's most likely class as its label.

    Returns:
        kl: kl_loss. hard: hard_loss. dkd: dkd_target and dkd_nontarget. dist: dist_inter and dist_intra. All at least float32,
        even under autocast.
    """
    student, teacher, temperature = _exact(student_logits), _exact(teacher_logits), settings.temperature
    if settings.standardize_logits:
        student, teacher = standardized(student), standardized(teacher)
    if settings.method == "kl":
        return {"kl_loss": temperature_kl(student, teacher, temperature)}
    if settings.method == "hard":
        return {"hard_loss": hard_distillation(student, teacher)}
    if settings.method == "dkd":
        answers = teacher.argmax(1)
        labels, labels_b = (torch.where(own == UNLABELLED, answers, own) for own in (batch.labels, batch.labels_b))
        target, nontarget = decoupled_kl(student, teacher, temperature, labels, labels_b, batch.lam)
        return {"dkd_target": settings.dkd_alpha * target, "dkd_nontarget": settings.dkd_beta * nontarget}
    if settings.method == "dist":
        inter, intra = relation_distances(student, teacher, temperature)
        return {"dist_inter": settings.dist_beta * inter, "dist_intra": settings.dist_gamma * intra}
    raise ValueError(f"method {settings.method!r} is unknown: kl, hard, dkd or dist")


def temperature_kl(student_logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """The distillation loss of Hinton et al.: T² KL(softmax(teacher / T) ‖ softmax(student / T)), mean over the batch.

    Hinton, Vinyals and Dean 2015, https://arxiv.org/abs/1503.02531, section 2; the factor T² keeps its gradients on the
    scale of the label loss. The mean is over images, not over images × classes (`batchmean` of torch's KLDivLoss).

    For per-pixel logits it is the mean over all pixels, as in Liu et al. (2019, https://arxiv.org/abs/1903.04197,
    equation 1, there with T = 1). Unlabelled pixels count too: a teacher's answer needs no label, and there it is all that
    a student can learn from. So each process averages over equally many pixels, and no count is exchanged. The part of a
    crop beyond its image counts too: both models see it as black.

    Args:
        student_logits, teacher_logits: (batch, classes), or (batch, classes, height, width). The teacher's may be -inf where it
            excludes a class.
        temperature: T, above 0.

    Returns:
        A scalar, in nats.
    """
    return (
        _kl(_log_softmax(student_logits, temperature), _log_softmax(teacher_logits, temperature)).mean()
        * temperature**2
    )


def hard_distillation(student_logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the teacher's most likely class, mean over the batch.

    Touvron et al. 2021, https://arxiv.org/abs/2012.12877, section 4, hard-label distillation, for a student without a
    distillation token; as there, the teacher's label is not smoothed. The paper weighs this and the label loss by one half each.

    Args:
        student_logits, teacher_logits: (batch, classes).

    Returns:
        A scalar, in nats.
    """
    return F.cross_entropy(_exact(student_logits), teacher_logits.argmax(1))


def decoupled_kl(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    temperature: float,
    labels: torch.Tensor,
    labels_b: torch.Tensor,
    lam: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of decoupled knowledge distillation: how likely the label is, and how the rest is spread over the others.

    Zhao et al. 2022, https://arxiv.org/abs/2203.08679, equation 7: TCKD = KL between the two-way distributions
    (p_label, 1 - p_label) of teacher and student, NCKD = KL between their distributions over the other classes alone;
    DKD = α TCKD + β NCKD. Multiplied by T² and averaged over the batch, as in the authors' code; their linear warm-up of 20
    epochs is left out. The paper assumes one label per image. For a mixed image each part is the mean over both labels,
    weighted by their shares, as in the label loss: with α = 1 and β = the teacher's 1 - p_label, the two parts add up to the
    whole KL for each label, and so do their means.

    Args:
        student_logits, teacher_logits: (batch, classes), at least 2 classes.
        temperature: T, above 0.
        labels, labels_b, lam: (batch,), as in LabelledBatch.

    Returns:
        TCKD and NCKD, scalars in nats.
    """
    student, teacher = _log_softmax(student_logits, temperature), _log_softmax(teacher_logits, temperature)

    def parts(classes: torch.Tensor) -> torch.Tensor:
        return torch.stack([_kl(*pair) for pair in zip(_decoupled(student, classes), _decoupled(teacher, classes))])

    target, nontarget = (lam * parts(labels) + (1 - lam) * parts(labels_b)).mean(1) * temperature**2
    return target, nontarget


def relation_distances(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of DIST: how far the probabilities are from a linear relation, within an image and within a class.

    Huang et al. 2022, https://arxiv.org/abs/2205.10536, section 4: the Pearson distance 1 - ρ of the rows
    (inter-class) and of the columns (intra-class) of softmax(logits / τ), mean over images and over classes. Multiplied by
    τ², as in the authors' code. The columns cover this process's micro-batch alone: relations across processes, or across
    the parts of an accumulated batch, are not computed.

    Args:
        student_logits, teacher_logits: (batch, classes).
        temperature: τ, above 0. The authors' default is 1.

    Returns:
        The inter-class and the intra-class distance, scalars from 0 to 2 times τ². Constant values count as unrelated: 1.
    """
    student, teacher = (_log_softmax(logits, temperature).exp() for logits in (student_logits, teacher_logits))
    inter, intra = pearson_distance(student, teacher), pearson_distance(student.T, teacher.T)
    return inter.mean() * temperature**2, intra.mean() * temperature**2


def pearson_distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """1 - Pearson's correlation of each row: (rows, values) twice -> (rows,)."""
    first, second = (values - values.mean(1, keepdim=True) for values in (first, second))
    norms: torch.Tensor = torch.linalg.vector_norm(first, dim=1) * torch.linalg.vector_norm(second, dim=1)
    return 1 - (first * second).sum(1) / (norms + EPSILON)


def standardized(logits: torch.Tensor) -> torch.Tensor:
    """Each image's logits with mean 0 and standard deviation 1, so that a student need not match the teacher's scale.

    Sun et al. 2024, https://arxiv.org/abs/2403.01427, section 3. The loss applies the base temperature afterwards, with its
    factor T²; the authors use 2, and 9 as the KL's weight. As in their code the variance is the sum of squares over
    classes - 1, and 1e-7 is added to the standard deviation: constant logits become 0.

    Args:
        logits: (batch, classes), at least 2 classes.
    """
    logits = _exact(logits)
    deviation, mean = torch.std_mean(logits, dim=1, keepdim=True)
    return (logits - mean) / (deviation + 1e-7)


def label_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    labels_b: torch.Tensor | None = None,
    lam: torch.Tensor | None = None,
    *,
    smoothing: float = 0.0,
    labelled_share: float = 1.0,
) -> torch.Tensor:
    """Cross-entropy with the labels: the sum over the labelled images of the batch, divided by their average number in a batch.

    That divisor is the same in every batch, so that each labelled image weighs the same over a run, and processes that average
    their gradients need not know how many labels the others have.

    Args:
        logits: (batch, classes).
        labels: (batch,), class numbers, or UNLABELLED.
        labels_b, lam: (batch,); an image counts as its label with weight lam, 0…1, and as the other one with the rest,
            as in mixup and CutMix (https://arxiv.org/abs/1710.09412, https://arxiv.org/abs/1905.04899). None: not mixed.
        smoothing: weight of the uniform distribution, https://arxiv.org/abs/1512.00567 section 7.
        labelled_share: share of all images that have a label, 0 to 1.

    Returns:
        A scalar, in nats; 0 with gradients of 0 if no image has a label.
    """
    logits = _exact(logits)

    def each(classes: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, classes, ignore_index=UNLABELLED, label_smoothing=smoothing, reduction="none")

    found = each(labels)
    if labels_b is not None:
        assert lam is not None, "mixed labels come with the images' own shares"
        found = lam * found + (1 - lam) * each(labels_b)
    mean = found.mean()
    return mean / labelled_share if 0 < labelled_share < 1 else mean


def pixel_cross_entropy(
    logits: torch.Tensor, masks: torch.Tensor, ignore_index: int, labelled: torch.Tensor | None = None
) -> torch.Tensor:
    """Cross-entropy with a mask's classes: -1/n Σ log softmax(logits)[class], summed over the n pixels that are not ignored.

    Args:
        logits: (batch, classes, height, width).
        masks: (batch, height, width), class numbers or `ignore_index`, int64.
        labelled: n, a scalar. None: counted in `masks`. Processes that average their gradients pass the mean of their
            counts, so that each pixel of the global batch weighs the same, however unevenly ignored pixels are spread.

    Returns:
        A scalar, in nats; 0 with gradients of 0 if n is 0.
    """
    if labelled is None:
        labelled = (masks != ignore_index).sum()
    total = F.cross_entropy(logits.float(), masks, ignore_index=ignore_index, reduction="sum")
    return total / torch.where(labelled > 0, labelled, 1)


def dice_sums(logits: torch.Tensor, masks: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The sums that the Dice loss needs. Those of parts of a batch add up to those of the whole.

    Args:
        logits: (batch, classes, height, width).
        masks: (batch, height, width), class numbers or `ignore_index`, int64.

    Returns:
        (3, classes), at least float32. Per class, over the pixels that are not ignored: the sum of its probability where it is the
        label; the sum of its probability; and the number of pixels labelled with it.
    """
    probabilities = _exact(logits).softmax(1)
    labelled = (masks != ignore_index)[:, None]
    own = (masks[:, None] == torch.arange(logits.shape[1], device=masks.device).view(1, -1, 1, 1)) & labelled
    both, predicted = ((probabilities * counted).sum((0, 2, 3)) for counted in (own, labelled))
    return torch.stack([both, predicted, own.sum((0, 2, 3)).to(both.dtype)])


def dice_loss(sums: torch.Tensor) -> torch.Tensor:
    """One minus the soft Dice coefficient of each class, 2 Σ p g / (Σ p + Σ g), mean over the classes that have a labelled pixel.

    Drozdzal et al. 2016, https://arxiv.org/abs/1608.04117, section 2.2, for two classes; for more, the mean over classes, as in
    nnU-Net (https://arxiv.org/abs/1809.10486, section 2.2), over the pixels of the whole batch rather than image by image: one image
    shows few of the classes. A class without a labelled pixel has no useful gradient, and is left out.

    Args:
        sums: (3, classes), of `dice_sums`.

    Returns:
        A scalar from 0 to 1; 0 with gradients of 0 if no pixel is labelled.
    """
    both, predicted, labelled = sums.unbind()
    occurs = labelled > 0
    dice = 2 * both / torch.where(occurs, predicted + labelled, 1)
    return ((1 - dice) * occurs).sum() / occurs.sum().clamp(min=1)


def _exact(logits: torch.Tensor) -> torch.Tensor:
    """In float32, if they are less precise."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return F.log_softmax(_exact(logits) / temperature, dim=1)


def _kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ student) of each row of log-probabilities: (rows, classes) twice -> (rows,)."""
    return F.kl_div(student, teacher.exp(), reduction="none").sum(1)  # takes probabilities, for which 0 log 0 is 0


def _decoupled(log_probabilities: torch.Tensor, classes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (batch, classes) -> of the class and of all others together (batch, 2), of each class among the others."""
    classes = classes[:, None]
    # the smallest number in the class's place: its probability is 0, and its logarithm can still be subtracted
    others = log_probabilities.scatter(1, classes, torch.finfo(log_probabilities.dtype).min)
    rest = others.logsumexp(1, keepdim=True)
    return torch.cat([log_probabilities.gather(1, classes), rest], dim=1), others - rest
