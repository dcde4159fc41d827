// SPDX-License-Identifier: Apache-2.0
#include "runtime/package_ops.h"

#include <optional>

#include "ikbo/error.h"
#include "runtime/ops_library.h"
#include "runtime/registered_ops.h"

namespace ikbo::runtime {
namespace {

void check_op(const Package& package, const OpSchema& op, const std::string& ops_library) {
  const std::optional<std::string> schema = registered_schema(op.name);
  IKBO_CHECK(schema.has_value(), package.path(), ": calls ", op.name, ", which operator library ",
             ops_library,
             " does not have; use the library of the ikbo "
             "version that wrote the package, or package the model again");
  IKBO_CHECK(*schema == op.schema, package.path(), ": was compiled against ", op.schema,
             "; operator library ", ops_library, " has ", *schema,
             ": use the library of the ikbo version that wrote the package, or package the model "
             "again");
}

}  // namespace

void check_ops(const Package& package, const std::string& ops_library) {
  if (package.manifest().ops.empty()) {
    return;
  }
  IKBO_CHECK(!ops_library.empty(), package.path(), ": calls ", package.manifest().ops[0].name,
             "; an operator library (libikbo_ops.so) must be given; got none");
  load_ops_library(ops_library);
  for (const OpSchema& op : package.manifest().ops) {
    check_op(package, op, ops_library);
  }
}

}  // namespace ikbo::runtime
