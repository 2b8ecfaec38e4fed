/* What the fake GPU and the fake NCCL have in common, as CUDA's driver is to the real ones: one
   small library, once per process, in C. Nothing here touches a GPU. */
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

/* What a StreamHandle of the fake device points to begins with this. */
struct FarandoleFakeStream {
  /* Puts a call into the stream: `run` once per execution, `release` once at the end, executed or
     not. `name` is static text. Returns 0; any thread. */
  int (*enqueue)(struct FarandoleFakeStream* self, const char* name, void (*run)(void* argument),
                 void (*release)(void* argument), void* argument);
};

struct FarandoleFakeDevice {
  int index;
  const char* bus_id;
  struct FarandoleFakeStream* default_stream; /* What a null stream means. */
};

/* The calling thread's current device; null until one was made current. The pointer is valid while
   the fake runtime lives that made it current. */
__attribute__((visibility("default"))) const struct FarandoleFakeDevice*
farandole_fake_current_device(void);
__attribute__((visibility("default"))) void farandole_fake_set_current_device(
    const struct FarandoleFakeDevice* device);

#ifdef __cplusplus
}
#endif
