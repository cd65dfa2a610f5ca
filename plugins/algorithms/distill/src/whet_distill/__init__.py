"""Distillation: learn to say what a teacher would say."""
