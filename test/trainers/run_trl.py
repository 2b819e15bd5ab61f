"""trl's SFTTrainer, with Accelerate's FSDP2."""

from datasets import Dataset
from harness import VOCABULARY, Run, main
from hugging_face import fsdp2_arguments, llama, rows, train
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"word{number}": number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), eos_token="word0", pad_token="word1")


def sft(run: Run, **others: object) -> None:
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
    config = fsdp2_arguments(SFTConfig, dataset_kwargs={"skip_prepare_dataset": True}, **others)
    train(run, SFTTrainer, llama(), config, train_dataset=data, processing_class=tokenizer())


main({"sft": sft})
