// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "fixtures.h"
#include "ikbo/error.h"
#include "server/package_gate.h"

namespace ikbo::server {
namespace {

namespace fs = std::filesystem;
using testing::expect_contains;

// Files that are no packages: the gate's own refusals come before they are read.
class PackageGateTest : public ::testing::Test {
 protected:
  PackageGateTest() {
    fs::create_directories(folder_ / "models" / "deep");
    fs::create_directories(folder_ / "models-of-others");
    for (const char* name : {"models/a.pt2", "models/deep/b.pt2", "models-of-others/c.pt2"}) {
      std::ofstream(folder_ / name) << "x";
    }
    fs::create_symlink(folder_ / "models-of-others" / "c.pt2", folder_ / "models" / "link.pt2");
    fs::create_symlink(folder_ / "models", folder_ / "link");
  }
  ~PackageGateTest() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::string error_of(const std::string& name, const std::vector<std::string>& folders) const {
    PackageGate gate;
    for (const std::string& folder : folders) {
      gate.folders.push_back(path(folder));
    }
    try {
      open_package(path(name), gate);
    } catch (const Error& error) {
      return error.what();
    }
    ADD_FAILURE() << "expected an error";
    return "";
  }

  void expect_inside(const std::string& name, const std::vector<std::string>& folders) const {
    expect_contains(error_of(name, folders), "cannot be opened as a .pt2 archive");
  }

  void expect_outside(const std::string& name, const std::vector<std::string>& folders) const {
    expect_contains(error_of(name, folders),
                    "--model, --model-repository: must lie below --model-dir, ");
  }

  const fs::path folder_ =
      fs::canonical(fs::temp_directory_path()) / ("ikbo_gate_" + std::to_string(getpid()));
};

TEST_F(PackageGateTest, OpensBelowTheFolders) {
  expect_inside("models/a.pt2", {"models"});
  expect_inside("models/deep/b.pt2", {"models"});
  expect_inside("models/deep/../a.pt2", {"models"});
  expect_inside("models-of-others/c.pt2", {"models", "models-of-others"});
  expect_inside("models-of-others/c.pt2", {});
}

TEST_F(PackageGateTest, ResolvesLinks) {
  expect_inside("link/a.pt2", {"models"});
  expect_inside("models/a.pt2", {"link"});
  expect_outside("models/link.pt2", {"models"});
  expect_contains(error_of("models/link.pt2", {"models"}),
                  path("models/link.pt2") + ", which is " + path("models-of-others/c.pt2"));
}

TEST_F(PackageGateTest, RefusesWhatLiesOutside) {
  expect_outside("models-of-others/c.pt2", {"models"});  // one name begins like the other
  expect_outside("models/../models-of-others/c.pt2", {"models"});
  expect_outside("models/a.pt2", {"models/deep"});
  expect_contains(error_of("models/absent.pt2", {"models"}),
                  "--model, --model-repository: must be a path that is there");
}

TEST_F(PackageGateTest, ChecksFoldersAndKeys) {
  EXPECT_NO_THROW(check_gate({.folders = {path("models")}, .trust = {}}));
  EXPECT_THROW(check_gate({.folders = {path("models/a.pt2")}, .trust = {}}), Error);
  EXPECT_THROW(check_gate({.folders = {path("absent")}, .trust = {}}), Error);
  EXPECT_THROW(check_gate({.folders = {}, .trust = {.keys = {path("models/a.pt2")}}}), Error);
}

}  // namespace
}  // namespace ikbo::server
