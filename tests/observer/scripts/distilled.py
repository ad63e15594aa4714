"""torchdistill's distillation box: a frozen teacher, a student, a weighted loss."""

import torch
from torch import nn
from torch.utils.data import RandomSampler, SequentialSampler, TensorDataset
from torchdistill.core.distillation import get_distillation_box
from weights import tell

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
teacher = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
student = nn.Linear(16, 4)
kd = {
    "student_module_path": ".",
    "student_module_io": "output",
    "teacher_module_path": ".",
    "teacher_module_io": "output",
}
config = {
    "num_epochs": 2,
    "train_data_loader": {
        "dataset_id": "train",
        "sampler": {"class_or_func": RandomSampler},
        "kwargs": {"batch_size": 8, "num_workers": 1},
    },
    "val_data_loader": {
        "dataset_id": "train",
        "sampler": {"class_or_func": SequentialSampler},
        "kwargs": {"batch_size": 16},
    },
    "teacher": {"forward_proc": "forward_batch_only", "requires_grad": False, "sequential": [], "wrapper": None},
    "student": {"forward_proc": "forward_batch_only", "requires_grad": True, "sequential": [], "wrapper": None},
    "optimizer": {"key": "SGD", "kwargs": {"lr": 0.1}},
    "criterion": {
        "key": "WeightedSumLoss",
        "kwargs": {
            "sub_terms": {
                "kd": {
                    "criterion": {"key": "KDLoss", "kwargs": {**kd, "temperature": 4.0, "alpha": 0.5}},
                    "weight": 1.0,
                }
            }
        },
    },
}
if __name__ == "__main__":
    box = get_distillation_box(teacher, student, {"train": dataset}, config, torch.device("cpu"), None, False, 1)
    for epoch in range(box.num_epochs):
        box.pre_epoch_process(epoch=epoch)
        for inputs, targets, supplement in box.train_data_loader:
            box.pre_forward_process()
            loss = box.forward_process(inputs, targets, supplement)
            box.post_forward_process(loss)
        box.post_epoch_process()
    tell(student)
