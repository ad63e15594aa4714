"""Losses, each a small function of logits with its paper."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from training.data.batches import UNLABELLED, LabelledBatch, TaughtBatch
from training.settings.distillation import DistillationSettings

EPSILON = 1e-8
"""Keeps a correlation with constant values finite, as DIST's authors add it to the product of norms."""


def distillation_loss(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    batch: LabelledBatch | TaughtBatch,
    settings: DistillationSettings,
) -> dict[str, torch.Tensor]:
    """The teacher's part of the loss, by `settings.method`, as named scalars whose sum it is.

    The paper's own weights (DKD's alpha and beta, DIST's beta and gamma) are in the scalars already. With
    `standardize_logits` both models' logits are standardised first; `temperature` is then the paper's base temperature.

    Args:
        student_logits, teacher_logits: (batch, classes), of any floating-point type.
        batch: its labels, for DKD. Where there is none, the class that the teacher finds most likely is the label.

    Returns:
        kl: kl_loss. hard: hard_loss. dkd: dkd_target and dkd_nontarget. dist: dist_inter and dist_intra. All in float32 at least,
        also under autocast.
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

    Of logits for each pixel it is the mean over all pixels, as Liu et al. have it (2019, https://arxiv.org/abs/1903.04197,
    equation 1, there at T = 1). Those that nobody labelled count too: a teacher's answer needs no label, and where there is
    none it is all that a student can learn from. So each process's mean is over as many pixels, and no count is exchanged.
    What a crop has beyond its image counts too: both models see it black.

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
    """Cross-entropy with the class that the teacher finds most likely, mean over the batch.

    Touvron et al. 2021, https://arxiv.org/abs/2012.12877, section 4, hard-label distillation, for a student without a
    distillation token; as there, the teacher's label is not smoothed. The paper weighs it and the label loss by a half each.

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
    DKD = α TCKD + β NCKD. Times T² and mean over the batch, as the authors' code has it; their linear warm-up of 20 epochs
    is left out. The paper knows one label an image. For a mixed image both parts are the mean of those for either label,
    weighted by its share, as the label loss is: for α = 1 and β = 1 - p_label of the teacher each of them is the whole KL,
    and so is their mean.

    Args:
        student_logits, teacher_logits: (batch, classes), at least 2 classes.
        temperature: T, above 0.
        labels, labels_b, lam: (batch,), as LabelledBatch has them.

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
    (inter-class) and of the columns (intra-class) of softmax(logits / τ), mean over images and over classes. Times τ², as
    the authors' code has it. The columns are this process's share of the batch: their relation is not exchanged between
    processes, nor between the parts of an accumulated batch.

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

    Sun et al. 2024, https://arxiv.org/abs/2403.01427, section 3. The base temperature comes afterwards, in the loss, with its
    factor T²; the authors' runs have 2, and 9 as the KL's weight. As in their code the variance is the sum of squares over
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
    """Cross-entropy with the labels, mean over the labelled images of the batch, as far as their number is what it is on average.

    The sum over the labelled images is divided by the same number in every batch, so that each weighs the same in a run, and processes
    that average their gradients need not know how many labels the others have.

    Args:
        logits: (batch, classes).
        labels: (batch,), class numbers, or UNLABELLED.
        labels_b, lam: (batch,); an image counts as its label by lam, 0…1, and as the other one by the rest,
            as mixup and CutMix have it (https://arxiv.org/abs/1710.09412, https://arxiv.org/abs/1905.04899). None: not mixed.
        smoothing: weight of the uniform distribution, https://arxiv.org/abs/1512.00567 section 7.
        labelled_share: of all images, how many have a label, 0 to 1.

    Returns:
        A scalar, in nats; 0 with gradients of 0 where no image has a label.
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
        labelled: n, a scalar. None: counted in `masks`. Processes that average their gradients give the mean of their
            counts, so that each pixel of the global batch weighs the same, however unevenly the ignored ones lie.

    Returns:
        A scalar, in nats; 0 with gradients of 0 where n is 0.
    """
    if labelled is None:
        labelled = (masks != ignore_index).sum()
    total = F.cross_entropy(logits.float(), masks, ignore_index=ignore_index, reduction="sum")
    return total / torch.where(labelled > 0, labelled, 1)


def dice_sums(logits: torch.Tensor, masks: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """What the Dice loss needs of some pixels. The sums of parts of a batch add up to those of the whole.

    Args:
        logits: (batch, classes, height, width).
        masks: (batch, height, width), class numbers or `ignore_index`, int64.

    Returns:
        (3, classes), in float32 at least: of each class, over the pixels that are not ignored, the sum of its probability where it is the
        label; the sum of its probability; and how many pixels have it as their label.
    """
    probabilities = _exact(logits).softmax(1)
    labelled = (masks != ignore_index)[:, None]
    own = (masks[:, None] == torch.arange(logits.shape[1], device=masks.device).view(1, -1, 1, 1)) & labelled
    both, predicted = ((probabilities * counted).sum((0, 2, 3)) for counted in (own, labelled))
    return torch.stack([both, predicted, own.sum((0, 2, 3)).to(both.dtype)])


def dice_loss(sums: torch.Tensor) -> torch.Tensor:
    """One minus the soft Dice coefficient of each class, 2 Σ p g / (Σ p + Σ g), mean over the classes that some pixel is labelled as.

    Drozdzal et al. 2016, https://arxiv.org/abs/1608.04117, section 2.2, for two classes; of several classes the mean, as in
    nnU-Net (https://arxiv.org/abs/1809.10486, section 2.2), over the pixels of the whole batch and not image by image: an image
    shows few of the classes. A class without a labelled pixel has no gradient that would be of use, and is left out.

    Args:
        sums: (3, classes), of `dice_sums`.

    Returns:
        A scalar from 0 to 1; 0 with gradients of 0 where no pixel is labelled.
    """
    both, predicted, labelled = sums.unbind()
    occurs = labelled > 0
    dice = 2 * both / torch.where(occurs, predicted + labelled, 1)
    return ((1 - dice) * occurs).sum() / occurs.sum().clamp(min=1)


def _exact(logits: torch.Tensor) -> torch.Tensor:
    """In float32, where they are in less."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return F.log_softmax(_exact(logits) / temperature, dim=1)


def _kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ student) of each row of log-probabilities: (rows, classes) twice -> (rows,)."""
    return F.kl_div(student, teacher.exp(), reduction="none").sum(1)  # with probabilities, because 0 log 0 is 0 there


def _decoupled(log_probabilities: torch.Tensor, classes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (batch, classes) -> of the class and of all others together (batch, 2), of each other among them."""
    classes = classes[:, None]
    # the smallest number in the place of the class: its probability is 0, and its logarithm can still be subtracted
    others = log_probabilities.scatter(1, classes, torch.finfo(log_probabilities.dtype).min)
    rest = others.logsumexp(1, keepdim=True)
    return torch.cat([log_probabilities.gather(1, classes), rest], dim=1), others - rest
