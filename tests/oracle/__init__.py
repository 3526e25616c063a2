"""The oracle: real DeepSpeed engines on CPU that say what a checkpoint means.

``models`` and ``cases`` describe what is trained, ``ranks`` starts the processes, ``jobs`` is
what they do, ``truth`` gathers what an engine holds, and ``compare`` and ``files`` name every
difference.
"""
