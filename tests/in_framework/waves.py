"""Inputs that do not depend on a random generator, and digests by which results are recorded."""

import numpy as np


def waves(*shape, phase=0.0):
    # float64 in -1 to 1: samples of a chirp, so that no row of a matrix is a combination of others
    return np.sin(0.7 * np.arange(np.prod(shape, dtype=int)) ** 2.0 + phase).reshape(shape)


def digest(values):
    # Mean, and mean after multiplication with other waves, which a permutation of the values changes
    values = np.asarray(values, np.float64)
    return [float(values.mean()), float((values * waves(*values.shape, phase=1.0)).mean())]
