"""The same training by transformers.Trainer."""

import torch
from pictures import Extras, Photographs, built, loss_of, parsed
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments


class Classifier(nn.Module):
    """A model as Trainer wants it: it computes its loss."""

    def __init__(self, options):
        super().__init__()
        self.model, self.extras = built(options), Extras(options)

    def forward(self, images, labels):
        if self.training:
            self.extras.before_forward()
        return {"loss": loss_of(self.model, images, labels)}


class AfterStep(TrainerCallback):
    def __init__(self, extras):
        self.extras = extras

    def on_step_end(self, *_, **__):
        self.extras.after_step()


def collated(samples):
    images, labels = zip(*samples)
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}


def main():
    options = parsed()
    model = Classifier(options)
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        dataloader_num_workers=options.workers,
        dataloader_pin_memory=False,
        save_strategy="steps" if options.save_every else "no",
        save_steps=options.save_every or 500,
        eval_strategy="steps" if options.evaluate_every else "no",
        eval_steps=options.evaluate_every or None,
        learning_rate=1e-4,
        optim="adamw_torch" if options.optimizer == "adamw" else "sgd",
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        seed=0,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        data_collator=collated,
        train_dataset=Photographs(options.data / "train", options),
        eval_dataset=Photographs(options.data / "validation", options),
        callbacks=[AfterStep(model.extras)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
