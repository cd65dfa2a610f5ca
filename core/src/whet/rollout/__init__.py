"""Episodes, the stream that paces them, and evaluation."""
