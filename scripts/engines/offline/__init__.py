"""Engines that verify exports by their answers: a vLLM in another Python, llama.cpp in another folder."""
