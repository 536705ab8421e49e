# Run by CPack on each staged package, before the package is written: /usr/etc becomes /etc, and the documents that every Debian
# package has are added.
set(names server ballast-server dev libballast-dev dashboards ballast-dashboards alerts ballast-alerts)
foreach(component ${CPACK_COMPONENTS_ALL})
  set(stage ${CPACK_TEMPORARY_DIRECTORY}/${component})
  if(IS_DIRECTORY ${stage}/usr/etc)
    file(RENAME ${stage}/usr/etc ${stage}/etc)
  endif()
  list(FIND names ${component} index)
  math(EXPR index "${index} + 1")
  list(GET names ${index} package)
  set(documents ${stage}/usr/share/doc/${package})
  file(MAKE_DIRECTORY ${documents})
  file(COPY_FILE ${CMAKE_CURRENT_LIST_DIR}/copyright ${documents}/copyright)
  string(TIMESTAMP now "%a, %d %b %Y %H:%M:%S +0000" UTC)
  file(WRITE ${CPACK_TEMPORARY_DIRECTORY}/changelog "${package} (${CPACK_PACKAGE_VERSION}) unstable; urgency=medium

  * Changes are told in CHANGELOG.md.

 -- ${CPACK_PACKAGE_CONTACT}  ${now}
")
  foreach(pair "${CPACK_TEMPORARY_DIRECTORY}/changelog|changelog" "${CMAKE_CURRENT_LIST_DIR}/../../CHANGELOG.md|CHANGELOG.md")
    string(REPLACE "|" ";" pair ${pair})
    list(GET pair 0 source)
    list(GET pair 1 name)
    execute_process(COMMAND gzip -9n INPUT_FILE ${source} OUTPUT_FILE ${documents}/${name}.gz COMMAND_ERROR_IS_FATAL ANY)
  endforeach()
endforeach()
file(REMOVE ${CPACK_TEMPORARY_DIRECTORY}/changelog)
