"""MLPerf image classification: ResNet-50 v1.5 on ImageNet."""
