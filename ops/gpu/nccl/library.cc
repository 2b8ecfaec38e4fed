#include "ops/gpu/nccl/library.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>

#include <algorithm>
#include <mutex>
#include <string_view>
#include <utility>

#include "core/plugin_loader.h"
#include "ops/gpu/backend_selection.h"

namespace farandole {
namespace {

std::string DirectoryOf(const std::string& file) {
  const size_t slash = file.rfind('/');
  return slash == std::string::npos ? "." : file.substr(0, slash);
}

void AddOnce(std::vector<std::string>& all, std::string one) {
  if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(std::move(one));
}

// ".../site-packages" of ".../site-packages/numpy/x.so", or "".
std::string PackageFolder(const std::string& file) {
  for (const std::string_view name : {"/site-packages/", "/dist-packages/"}) {
    const size_t at = file.find(name);
    if (at != std::string::npos) return file.substr(0, at + name.size() - 1);
  }
  return {};
}

std::vector<std::string> MappedFiles() {
  std::vector<std::string> files;
  const auto add = [](dl_phdr_info* info, size_t, void* to) {
    if (info->dlpi_name != nullptr && *info->dlpi_name != '\0') {
      static_cast<std::vector<std::string>*>(to)->emplace_back(info->dlpi_name);
    }
    return 0;
  };
  dl_iterate_phdr(add, &files);
  return files;
}

std::string OwnDirectory() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&NcclFiles), &info) == 0) return ".";
  return DirectoryOf(info.dli_fname);
}

std::string FileOf(void* handle) {
  const link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return kNcclSoname;
  return map->l_name;
}

bool IsSameFile(const std::string& a, const std::string& b) {
  struct stat of_a {};
  struct stat of_b {};
  return stat(a.c_str(), &of_a) == 0 && stat(b.c_str(), &of_b) == 0 && of_a.st_dev == of_b.st_dev &&
         of_a.st_ino == of_b.st_ino;
}

void* Mapped() { return dlopen(kNcclSoname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD); }

// A file of another soname would not be recognised when it is looked for the next time.
Result<void*> Map(const std::string& name) {
  void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return Unavailable(LoaderText());
  if (Mapped() == handle) return handle;
  dlclose(handle);
  return InvalidArgument("\"" + name + "\" is no " + kNcclSoname + ": its soname is another");
}

Result<void*> UseOnly(const std::string& path) {
  if (void* const mapped = Mapped(); mapped != nullptr) {
    if (IsSameFile(FileOf(mapped), path)) return mapped;
    return InvalidArgument("FARANDOLE_NCCL names \"" + path + "\", but this process has \"" +
                           FileOf(mapped) +
                           "\" mapped already, and two copies of NCCL corrupt each other; name "
                           "that one or unset FARANDOLE_NCCL");
  }
  Result<void*> handle = Map(path);
  if (handle.ok()) return handle;
  return Status(handle.status().code(), "cannot use FARANDOLE_NCCL: " + handle.status().message());
}

}  // namespace

std::vector<std::string> NcclFiles(const std::string& own_directory,
                                   std::span<const std::string> mapped_files) {
  std::vector<std::string> folders = {DirectoryOf(own_directory)};
  for (const std::string& file : mapped_files) {
    if (std::string folder = PackageFolder(file); !folder.empty()) AddOnce(folders, folder);
  }
  std::vector<std::string> files;
  for (const std::string& folder : folders) {
    AddOnce(files, folder + "/nvidia/nccl/lib/" + kNcclSoname);
  }
  for (const std::string& folder : folders) {
    if (PackageFolder(folder + "/").empty()) continue;
    AddOnce(files, DirectoryOf(DirectoryOf(folder)) + "/" + kNcclSoname);  // <prefix>/lib
  }
  files.push_back(std::string("/usr/local/cuda/lib64/") + kNcclSoname);
  files.push_back(kNcclSoname);
  return files;
}

namespace {

// dlopen's handle of the one libnccl, which is mapped if it was not yet.
Result<void*> FindNccl(const std::string& path) {
  if (!path.empty()) return UseOnly(path);
  if (void* const mapped = Mapped(); mapped != nullptr) return mapped;
  std::string answers;
  for (const std::string& file : NcclFiles(OwnDirectory(), MappedFiles())) {
    Result<void*> handle = Map(file);
    if (handle.ok()) return handle;
    answers += (answers.empty() ? "" : "; ") + handle.status().message();
  }
  return Unavailable("no " + std::string(kNcclSoname) + " is mapped in this process or found (" +
                     answers +
                     "); install one (PyPI: nvidia-nccl-cu12 or nvidia-nccl-cu13) or name its file "
                     "with FARANDOLE_NCCL");
}

// @return The name of a function that the library lacks, or nullptr.
const char* BindAll(void* handle, NcclApi& api) {
  const char* missing = nullptr;
  const auto bind = [&]<class Function>(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    if (function == nullptr && missing == nullptr) missing = name;
  };
  bind(api.GetVersion, "ncclGetVersion");
  bind(api.GetUniqueId, "ncclGetUniqueId");
  bind(api.GetErrorString, "ncclGetErrorString");
  bind(api.GetLastError, "ncclGetLastError");
  bind(api.CommInitRankConfig, "ncclCommInitRankConfig");
  bind(api.CommGetAsyncError, "ncclCommGetAsyncError");
  bind(api.CommFinalize, "ncclCommFinalize");
  bind(api.CommDestroy, "ncclCommDestroy");
  bind(api.CommAbort, "ncclCommAbort");
  bind(api.AllReduce, "ncclAllReduce");
  bind(api.Broadcast, "ncclBroadcast");
  bind(api.AllGather, "ncclAllGather");
  bind(api.ReduceScatter, "ncclReduceScatter");
  bind(api.Send, "ncclSend");
  bind(api.Recv, "ncclRecv");
  bind(api.MemAlloc, "ncclMemAlloc");
  bind(api.MemFree, "ncclMemFree");
  bind(api.CommRegister, "ncclCommRegister");
  bind(api.GroupStart, "ncclGroupStart");
  bind(api.GroupEnd, "ncclGroupEnd");
  return missing;
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
  const char* const missing = BindAll(handle, api);
  const std::string file = FileOf(api, name.empty() ? kNcclSoname : name);
  int version = 0;
  if (api.GetVersion == nullptr || api.GetVersion(&version) != NcclResult::kSuccess) {
    return InvalidArgument("\"" + file + "\" is no NCCL library: it reports no version");
  }
  if (version < kOldestNccl) {
    return InvalidArgument("\"" + file + "\" is NCCL " + NcclVersionText(version) + "; at least " +
                           NcclVersionText(kOldestNccl) + " is needed");
  }
  if (missing != nullptr) {
    return InvalidArgument("\"" + file + "\" (NCCL " + NcclVersionText(version) + ") has no " +
                           missing);
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
