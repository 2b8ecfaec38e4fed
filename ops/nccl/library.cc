#include "ops/nccl/library.h"

#include <dlfcn.h>

#include <mutex>
#include <utility>

#include "ops/nccl/api.h"
#include "ops/nccl/find.h"

namespace farandole {
namespace {

// The functions of one library, and which required one it lacks.
class Binder {
 public:
  explicit Binder(void* handle) : handle_(handle) {}

  template <class Function>
  void Optional(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(handle_, name));
  }
  template <class Function>
  void Required(Function& function, const char* name) {
    Optional(function, name);
    if (function == nullptr && missing_ == nullptr) missing_ = name;
  }
  const char* missing() const { return missing_; }

 private:
  void* const handle_;
  const char* missing_ = nullptr;
};

Binder BindAll(void* handle, NcclApi& api) {
  Binder binder(handle);
  binder.Required(api.GetVersion, "ncclGetVersion");
  binder.Required(api.GetUniqueId, "ncclGetUniqueId");
  binder.Required(api.GetErrorString, "ncclGetErrorString");
  binder.Required(api.GetLastError, "ncclGetLastError");
  binder.Required(api.CommInitRankConfig, "ncclCommInitRankConfig");
  binder.Required(api.CommGetAsyncError, "ncclCommGetAsyncError");
  binder.Required(api.CommFinalize, "ncclCommFinalize");
  binder.Required(api.CommDestroy, "ncclCommDestroy");
  binder.Required(api.CommAbort, "ncclCommAbort");
  binder.Required(api.AllReduce, "ncclAllReduce");
  binder.Required(api.Broadcast, "ncclBroadcast");
  binder.Required(api.AllGather, "ncclAllGather");
  binder.Required(api.ReduceScatter, "ncclReduceScatter");
  binder.Required(api.Send, "ncclSend");
  binder.Required(api.Recv, "ncclRecv");
  binder.Required(api.GroupStart, "ncclGroupStart");
  binder.Required(api.GroupEnd, "ncclGroupEnd");
  binder.Optional(api.CommShrink, "ncclCommShrink");
  binder.Optional(api.MemAlloc, "ncclMemAlloc");
  binder.Optional(api.MemFree, "ncclMemFree");
  binder.Optional(api.CommRegister, "ncclCommRegister");
  binder.Optional(api.CommDeregister, "ncclCommDeregister");
  return binder;
}

std::string FileOf(const NcclApi& api, const std::string& otherwise) {
  Dl_info info{};
  const int found = dladdr(reinterpret_cast<const void*>(api.GetVersion), &info);
  return found != 0 && info.dli_fname != nullptr ? info.dli_fname : otherwise;
}

// Never destroyed: engines may use it until the process is gone.
struct OneOfProcess {
  std::mutex mutex;
  std::shared_ptr<const NcclLibrary> library;
};
OneOfProcess& ThisProcess() {
  static OneOfProcess* const one = new OneOfProcess;
  return *one;
}

}  // namespace

std::string NcclVersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Result<const NcclLibrary*> NcclLibrary::OfProcess(const std::string& path) {
  OneOfProcess& process = ThisProcess();
  std::lock_guard lock(process.mutex);
  if (process.library != nullptr && path.empty()) return process.library.get();
  Result<void*> handle = FindNccl(path);
  if (!handle.ok()) return handle.status();
  if (process.library == nullptr) {
    Result<std::shared_ptr<const NcclLibrary>> library = In(handle.value(), path);
    if (!library.ok()) return library.status();
    process.library = std::move(library).value();
  }
  return process.library.get();
}

Result<std::shared_ptr<const NcclLibrary>> NcclLibrary::In(void* handle, const std::string& name) {
  NcclApi api;
  const Binder binder = BindAll(handle, api);
  const std::string file = FileOf(api, name.empty() ? kNcclSoname : name);
  int version = 0;
  if (api.GetVersion == nullptr || api.GetVersion(&version) != NcclResult::kSuccess) {
    return InvalidArgument("\"" + file + "\" is no NCCL library: it tells no version");
  }
  if (version < kOldestNccl) {
    return InvalidArgument("\"" + file + "\" is NCCL " + NcclVersionText(version) + "; at least " +
                           NcclVersionText(kOldestNccl) + " is needed");
  }
  if (binder.missing() != nullptr) {
    return InvalidArgument("\"" + file + "\" (NCCL " + NcclVersionText(version) + ") has no " +
                           binder.missing());
  }
  return std::make_shared<const NcclLibrary>(api, version, file);
}

NcclLibrary::NcclLibrary(NcclApi api, int version, std::string file)
    : api_(std::make_shared<const NcclApi>(api)), version_(version), file_(std::move(file)) {}

std::string NcclLibrary::Describe() const {
  return "NCCL " + NcclVersionText(version_) + " (" + file_ + ")";
}

Result<std::string> NcclLibrary::MakeUniqueId() const {
  NcclUniqueId id{};
  const NcclResult result = api_->GetUniqueId(&id);
  if (result == NcclResult::kSuccess) return std::string(id.internal, sizeof(id.internal));
  return Internal(std::string("ncclGetUniqueId: ") + api_->GetErrorString(result) + "; " +
                  api_->GetLastError(nullptr) + "; " + Describe());
}

}  // namespace farandole
