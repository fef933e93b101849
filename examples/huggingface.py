"""A GPT-2 of transformers on the bytes of a text file, with the Trainer over zk. One process, or several with torchrun.

    python examples/huggingface.py --data README.md
    python examples/huggingface.py --stage 3 --offload --bf16
    torchrun --nproc_per_node 2 examples/huggingface.py --stage 3

Against the plain Trainer, two lines differ: the import, and ``zero=``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from zk.integrations.huggingface import ZeroTrainer


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of ``length`` bytes, one after the other."""

    def __init__(self, data: bytes, length: int) -> None:
        self.pieces = torch.frombuffer(bytearray(data), dtype=torch.uint8).long().split(length)[:-1]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path(__file__).parent.parent / "docs" / "architecture.md")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--offload", action="store_true", help="training state, and at stage 3 parameters, rest in host memory")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--out", default="runs/huggingface")
    options = parser.parse_args()

    data = options.data.read_bytes()
    cut = len(data) * 9 // 10
    zero = {"stage": options.stage}
    if options.offload:
        zero |= {"optimizer_tier": "host"} | ({"param_tier": "host"} if options.stage == 3 else {})

    trainer = ZeroTrainer(
        model=GPT2LMHeadModel(
            GPT2Config(vocab_size=256, n_positions=64, n_embd=options.width, n_layer=options.layers, n_head=4, bos_token_id=0, eos_token_id=0)
        ),
        args=TrainingArguments(
            output_dir=options.out,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=2e-3,
            warmup_steps=5,
            bf16=options.bf16,
            use_cpu=not torch.cuda.is_available(),
            eval_strategy="steps",
            eval_steps=max(1, options.steps // 3),
            logging_steps=max(1, options.steps // 6),
            save_steps=options.steps,
            report_to=[],
        ),
        train_dataset=Text(data[:cut], 64),
        eval_dataset=Text(data[cut:], 64),
        zero=zero,
    )
    trainer.train()
    trainer.save_model()  # for from_pretrained
    if trainer.is_world_process_zero():
        print(f"validation loss {trainer.state.log_history[-2]['eval_loss']:.3f} nats per byte; the model is in {options.out}")


if __name__ == "__main__":
    main()
