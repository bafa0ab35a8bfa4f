"""What a user is shown: history, pictures, tables, loggers, progress bars, the notebook."""
