"""The functions that a training needs of a framework: the same names in each module, so that Run works with any.

``start(config)`` joins the ranks, ``finish()`` leaves them; ``barrier()`` and ``total(values)`` wait for all ranks,
``broadcast(...)`` gives them rank 0's weights; ``LaggedSums`` adds up losses and stop votes without a wait;
``input_wait(ranks)`` measures how long the device waits for data; ``save(path, content)`` and ``load(path)`` write and
read one file of a checkpoint; ``synchronize()`` waits for the device; ``arithmetic(ranks)`` says what is in force of
the settings that change numbers.
"""
