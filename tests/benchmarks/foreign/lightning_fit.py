"""The same training by lightning's Trainer."""

import os

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from pictures import Extras, Photographs, built, loss_of, optimizer_of, parsed
from torch.utils.data import DataLoader


class Classifier(pl.LightningModule):
    def __init__(self, options):
        super().__init__()
        self.model, self.extras = built(options), Extras(options)

    def training_step(self, batch, _):
        self.extras.before_forward()
        loss = loss_of(self.model, *batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, *_):
        self.extras.after_step()

    def validation_step(self, batch, _):
        self.log("val_loss", loss_of(self.model, *batch))

    def configure_optimizers(self):
        return optimizer_of(self, self.extras.options)


def main():
    options = parsed()
    pl.seed_everything(0)
    training = Photographs(options.data / "train", options)
    loader = DataLoader(training, batch_size=options.batch_size, shuffle=True, num_workers=options.workers)
    held_out = DataLoader(Photographs(options.data / "validation", options), batch_size=options.batch_size)
    callbacks = [ModelCheckpoint(every_n_train_steps=options.save_every)] if options.save_every else []
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=options.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=bool(options.save_every),
        callbacks=callbacks,
        val_check_interval=options.evaluate_every or None,
        check_val_every_n_epoch=None if options.evaluate_every else 1,
        limit_val_batches=1.0 if options.evaluate_every else 0,
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(options), loader, held_out)


if __name__ == "__main__":
    main()
