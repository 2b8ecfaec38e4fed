/* libfarandole_fake_cuda.so in C, for tests in Python (ctypes) and C: what a framework would do to
   its streams.

   The library is also a plug-in: FARANDOLE_CUDA_PLUGIN names it, and whole jobs then run on a fake
   GPU, any host memory posing as device memory. Its devices, per process:
     FARANDOLE_TEST_CUDA_DEVICES   how many (8). Process i of a host works on device i modulo that,
                                   so that 1 puts all ranks on one GPU.
     FARANDOLE_TEST_CUDA_SLOW_US   the library's own streams sleep so long before every command.

   A stream is a handle as its creator got it; NULL is the device's default stream. Functions that
   answer int say 0, or 1 for a device or a stream that is not there. Any thread. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* NULL for a device that is not there. */
void* farandole_fake_stream_create(int device);
/* What it holds still runs. */
int farandole_fake_stream_destroy(int device, void* stream);
/* The host waits until all that was put in has run. */
int farandole_fake_stream_synchronize(int device, void* stream);
/* 1 if nothing is left to run. */
int farandole_fake_stream_is_idle(int device, void* stream);
/* `size` bytes of `from`, taken now, appear in `to` when the stream comes to it and `delay_us` have
   passed: a producer. */
int farandole_fake_stream_write(int device, void* stream, void* to, const void* from, int64_t size,
                                int64_t delay_us);
/* `size` bytes of `from`, as they are when the stream comes to it, are copied to `to`: a consumer.
 */
int farandole_fake_stream_copy(int device, void* stream, void* to, const void* from, int64_t size);
/* Nothing further begins until the release. */
int farandole_fake_stream_hold(int device, void* stream);
int farandole_fake_stream_release(int device, void* stream);
/* What is put in meanwhile is recorded, not run; ended, it is forgotten. */
int farandole_fake_stream_begin_capture(int device, void* stream);
int farandole_fake_stream_end_capture(int device, void* stream);

/* From now on every call fails, as after an illegal address. */
int farandole_fake_device_fail(int device);
/* "launches", "items", "copied_bytes", "host_waits", "live_streams", "live_blocks", "live_pinned",
   "events", "copies"; -1 for anything else. */
int64_t farandole_fake_device_count(int device, const char* what);
/* How many devices were opened. */
int farandole_fake_devices_opened(void);
/* The devices end, once no engine has them any more: streams run what they hold. Later uses find
   new ones. Without it they stay until the process ends. */
void farandole_fake_cuda_end(void);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
