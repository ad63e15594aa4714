"""What several students of one job may have of their own. Standard library only."""

OF_A_STUDENT = (
    *(
        "student",
        "student_options",
        "pretrained",
        "seed",
        "optimizer",
        "learning_rate",
        "weight_decay",
        "warmup_fraction",
    ),
    *("max_grad_norm", "ema_decay", "channels_last", "label_smoothing", "temperature", "hard_label_weight"),
    *("teacher_loss_weight", "method", "standardize_logits", "dkd_alpha", "dkd_beta", "dist_beta", "dist_gamma"),
)
"""Settings that each student may set anew. All others belong to the images, the teacher or the machine, which they share."""

MAX_STUDENTS = 22
"""Of one job: SageMaker then still has room for one metric of each, `training.runtime.metrics.sagemaker_metrics`."""
