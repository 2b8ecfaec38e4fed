// What a thread does between two looks at memory that another core writes.
#pragma once

namespace farandole {

/// Tells the core that this thread polls memory.
inline void Pause() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace farandole
