"""Text that a run reads or has its model write: files, data sets, conversations, answers; as windows of tokens."""
