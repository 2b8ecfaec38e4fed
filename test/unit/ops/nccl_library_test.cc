// The process's libnccl: each case in a process of its own, because a library stays mapped.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>

#include "ops/gpu/nccl/library.h"

namespace farandole {
namespace {

using ::testing::HasSubstr;

class NcclLibraryTest : public ::testing::Test {
 protected:
  NcclLibraryTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

/// Runs `body` in a fresh process; what it says with Require must hold.
#define EXPECT_IN_FRESH_PROCESS(body) \
  EXPECT_EXIT(                        \
      {                               \
        body;                         \
        std::exit(0);                 \
      },                              \
      ::testing::ExitedWithCode(0), "")

void Require(bool holds, const std::string& what) {
  if (holds) return;
  std::cerr << what << std::endl;
  std::exit(1);
}
void RequireIn(const std::string& text, const std::string& part) {
  Require(text.find(part) != std::string::npos, "no \"" + part + "\" in \"" + text + "\"");
}
std::string FileOfProcess() {
  const Result<const NcclLibrary*> library = NcclLibrary::OfProcess("");
  Require(library.ok(), library.status().message());
  return library.value()->file();
}

TEST_F(NcclLibraryTest, IsOneAndTheSameForAll) {
  EXPECT_IN_FRESH_PROCESS({
    const auto first = NcclLibrary::OfProcess(FARANDOLE_FAKE_NCCL);
    Require(first.ok(), first.status().message());
    Require(NcclLibrary::OfProcess("").value() == first.value(), "another");
    Require(NcclLibrary::OfProcess(FARANDOLE_FAKE_NCCL).value() == first.value(), "another");
    Require(dlopen(kNcclSoname, RTLD_NOW | RTLD_NOLOAD) == dlopen(FARANDOLE_FAKE_NCCL, RTLD_NOW),
            "two are mapped");
    RequireIn(first.value()->Describe(), "NCCL 2.32.3 (" FARANDOLE_FAKE_NCCL ")");
    Require(first.value()->MakeUniqueId().value().size() == 128, "an id of another size");
  });
}

TEST_F(NcclLibraryTest, IsTheOneThatIsMappedAlready) {
  EXPECT_IN_FRESH_PROCESS({
    Require(dlopen(FARANDOLE_FAKE_NCCL_OLD, RTLD_NOW) != nullptr, "cannot map it");
    Require(FileOfProcess() == FARANDOLE_FAKE_NCCL_OLD, FileOfProcess());
  });
}

TEST_F(NcclLibraryTest, IsNeverASecondOne) {
  EXPECT_IN_FRESH_PROCESS({
    Require(dlopen(FARANDOLE_FAKE_NCCL_OLD, RTLD_NOW) != nullptr, "cannot map it");
    const Status status = NcclLibrary::OfProcess(FARANDOLE_FAKE_NCCL).status();
    Require(status.code() == Code::kInvalidArgument, status.ToString());
    RequireIn(status.message(), FARANDOLE_FAKE_NCCL);
    RequireIn(status.message(), FARANDOLE_FAKE_NCCL_OLD);
    Require(FileOfProcess() == FARANDOLE_FAKE_NCCL_OLD, FileOfProcess());
  });
}

TEST_F(NcclLibraryTest, MayBeNamedByAnotherPathToTheSameFile) {
  EXPECT_IN_FRESH_PROCESS({
    Require(dlopen(FARANDOLE_FAKE_NCCL, RTLD_NOW) != nullptr, "cannot map it");
    const std::filesystem::path file = FARANDOLE_FAKE_NCCL;
    const auto library = NcclLibrary::OfProcess(file.parent_path() / "." / file.filename());
    Require(library.ok(), library.status().message());
  });
}

TEST_F(NcclLibraryTest, IsRefusedWhenItIsTooOld) {
  EXPECT_IN_FRESH_PROCESS({
    setenv("FARANDOLE_TEST_NCCL_VERSION", "22606", 1);
    const Status status = NcclLibrary::OfProcess(FARANDOLE_FAKE_NCCL).status();
    Require(status.code() == Code::kInvalidArgument, status.ToString());
    RequireIn(status.message(), "is NCCL 2.26.6; at least 2.27.0 is needed");
    RequireIn(status.message(), FARANDOLE_FAKE_NCCL);
  });
}

TEST_F(NcclLibraryTest, IsRefusedWhenItIsSomethingElse) {
  EXPECT_IN_FRESH_PROCESS({
    const Status other = NcclLibrary::OfProcess("libm.so.6").status();
    Require(other.code() == Code::kInvalidArgument, other.ToString());
    RequireIn(other.message(), "\"libm.so.6\" is no libnccl.so.2");
    const Status none = NcclLibrary::In(dlopen("libm.so.6", RTLD_NOW), "libm.so.6").status();
    Require(none.code() == Code::kInvalidArgument, none.ToString());
    RequireIn(none.message(), "is no NCCL library");
  });
}

TEST_F(NcclLibraryTest, SaysWhyAFileCannotBeLoaded) {
  EXPECT_IN_FRESH_PROCESS({
    const Status status = NcclLibrary::OfProcess("/nowhere/libnccl.so.2").status();
    Require(status.code() == Code::kUnavailable, status.ToString());
    RequireIn(status.message(), "FARANDOLE_NCCL");
    RequireIn(status.message(), "/nowhere/libnccl.so.2: cannot open shared object file");
  });
}

TEST_F(NcclLibraryTest, NamesEveryPlaceWhereItIsNot) {
  if (std::filesystem::exists("/usr/local/cuda/lib64/libnccl.so.2") ||
      dlopen(kNcclSoname, RTLD_NOW) != nullptr) {
    GTEST_SKIP() << "this machine has NCCL";
  }
  EXPECT_IN_FRESH_PROCESS({
    const Status status = NcclLibrary::OfProcess("").status();
    Require(status.code() == Code::kUnavailable, status.ToString());
    RequireIn(status.message(), "/nvidia/nccl/lib/libnccl.so.2: cannot open");
    RequireIn(status.message(), "/usr/local/cuda/lib64/libnccl.so.2: cannot open");
    RequireIn(status.message(), "nvidia-nccl-cu");
  });
}

TEST_F(NcclLibraryTest, LoadsTheRealOneWithoutAGpu) {
  const std::string file = FARANDOLE_REAL_NCCL;
  if (file.empty()) GTEST_SKIP() << "the build found no libnccl.so.2 of a wheel";
  EXPECT_IN_FRESH_PROCESS({
    const auto library = NcclLibrary::OfProcess(file);
    Require(library.ok(), library.status().message());
    Require(library.value()->version() >= kOldestNccl, library.value()->Describe());
    RequireIn(library.value()->Describe(), "(" + file + ")");
    Require(library.value()->MakeUniqueId().ok(), "it makes no id");
  });
}

}  // namespace
}  // namespace farandole
