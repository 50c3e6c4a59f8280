"""Engines that decode for us: a vLLM in another Python, llama.cpp in another folder; exports are verified by their answers."""
