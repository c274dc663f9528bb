"""What the words behind `headrace` do: one module a command, loaded when it is called."""
