"""Files of requests in, files of results out: the OpenAI Batch format, resumable line by line."""
