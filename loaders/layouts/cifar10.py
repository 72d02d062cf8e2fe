"""CIFAR-10: 50,000 training and 10,000 test images of 32x32, 10 classes."""

from loaders.layouts.mnist import mnist

cifar10 = mnist
