// Marks what a GPU runs too, in headers that both compilers read.
//
// The build defines FARANDOLE_ON_DEVICE as `__device__` where nvcc compiles kernels; elsewhere the
// same functions are ordinary ones, so that they run, and are tested, without a GPU.
#pragma once

#ifndef FARANDOLE_ON_DEVICE
#define FARANDOLE_ON_DEVICE
#endif
