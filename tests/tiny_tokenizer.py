"""The miniature's tokenizer, under the name the tests use."""

from twinreel.demo.tiny_tokenizer import ADDED, MERGES, SPECIAL, VOCAB, byte_letters, token_ids, write_tokenizer

__all__ = ["ADDED", "MERGES", "SPECIAL", "VOCAB", "byte_letters", "token_ids", "write_tokenizer"]
