"""A small vision transformer, made from scratch, trained and evaluated by transformers.Trainer."""

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed
from weights import tell


class Pictures(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(count)
        self.pictures = torch.randn(count, 3, 16, 16, generator=generator)
        self.labels = torch.randint(0, 4, (count,), generator=generator)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return {"pixel_values": self.pictures[index], "labels": self.labels[index]}


def main(callbacks=None):
    set_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=8,
        num_labels=4,
    )
    model = ViTForImageClassification(config)
    arguments = TrainingArguments(
        output_dir="out",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        dataloader_num_workers=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Pictures(64), eval_dataset=Pictures(32), callbacks=callbacks
    )
    trainer.train()
    tell(model)


if __name__ == "__main__":
    main()
