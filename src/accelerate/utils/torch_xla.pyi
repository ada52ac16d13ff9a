from accelerate.machine import install_xla as install_xla
