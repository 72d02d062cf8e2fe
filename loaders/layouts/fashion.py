"""Fashion-MNIST: 60,000 training and 10,000 test images of 28x28, 10 classes."""

from loaders.layouts.mnist import mnist

fashion = mnist
